"""Drop-ins for trainers and launchers."""
