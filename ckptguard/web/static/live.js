// Keeps the page current: fetches it again and replaces what changed, without losing focus, scroll or open details.
"use strict";
(() => {
  const EVERY = 4000;
  let failures = 0;

  const typing = () => {
    const active = document.activeElement;
    return active && ["INPUT", "TEXTAREA", "SELECT"].includes(active.tagName);
  };

  const place = (element) => {
    // Where an element is, so that its successor can be found in the new content.
    if (!element || !element.closest("[data-live]")) return null;
    if (element.id) return `#${CSS.escape(element.id)}`;
    const href = element.getAttribute("href");
    return href ? `a[href="${CSS.escape(href)}"]` : null;
  };

  const refresh = (fresh) => {
    for (const old of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(old.id);
      if (!next || next.innerHTML === old.dataset.seen) continue;
      const seen = next.innerHTML;
      for (const details of old.querySelectorAll("details[id]")) {
        const same = next.querySelector(`#${CSS.escape(details.id)}`);
        if (same) same.open = details.open;
      }
      const focused = place(document.activeElement);
      old.replaceChildren(...document.importNode(next, true).childNodes);
      old.dataset.seen = seen;
      if (focused) old.querySelector(focused)?.focus({ preventScroll: true });
    }
    document.getElementById("updated").textContent = fresh.getElementById("updated")?.textContent ?? "";
  };

  const look = async () => {
    if (!document.hidden && !typing()) {
      try {
        const answer = await fetch(location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
        if (!answer.ok) throw new Error(String(answer.status));
        refresh(new DOMParser().parseFromString(await answer.text(), "text/html"));
        failures = 0;
      } catch {
        failures += 1;
        document.getElementById("updated").textContent = "the service does not answer; trying again";
      }
    }
    setTimeout(look, EVERY * Math.min(8, 1 + failures));
  };

  for (const part of document.querySelectorAll("[data-live]")) part.dataset.seen = part.innerHTML;
  if (!location.pathname.startsWith("/login")) setTimeout(look, EVERY);
})();
