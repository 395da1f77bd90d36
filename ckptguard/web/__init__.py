"""The API and the page: reads the catalog, never checkpoint bytes."""
