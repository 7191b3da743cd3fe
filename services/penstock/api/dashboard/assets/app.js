// What pages do by themselves: keep up with the server, tell times as ages, remember the theme, help with lists.
// Everything works without it, but for the keeping up.
(() => {
  "use strict";

  const root = document.documentElement;
  const store = (name, value) => {
    try {
      if (value === undefined) return localStorage.getItem(name);
      if (value === null) localStorage.removeItem(name);
      else localStorage.setItem(name, value);
    } catch { /* a browser that keeps nothing */ }
    return null;
  };

  // Theme: as the system says, until somebody chooses.
  const theme = store("penstock-theme");
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;

  // Ages
  const SIZES = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
  const words = new Intl.RelativeTimeFormat("en", { numeric: "always", style: "narrow" });
  const age = (time) => {
    const seconds = (Date.parse(time.dateTime) - Date.now()) / 1000;
    if (Math.abs(seconds) < 1) return "now";
    const [unit, size] = SIZES.find(([, length]) => Math.abs(seconds) >= length) ?? SIZES[3];
    return words.format(Math.trunc(seconds / size), unit);
  };
  const tellAges = (within = document) => {
    for (const time of within.querySelectorAll("time[data-ago]")) {
      const text = age(time);
      if (time.textContent !== text) time.textContent = text;
    }
  };

  // The new content into the old, so that focus, open panels, ticks and what was typed stay.
  // By attributes: of a form that has a field named id, the property id is that field.
  const keyOf = (node) => (node.nodeType === 1 ? node.getAttribute("id") ?? node.getAttribute("data-key") ?? "" : "");
  const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);
  const near = (at, wanted) => {
    for (let node = at, steps = 0; node && steps < 4; node = node.nextSibling, steps += 1) {
      if (!keyOf(node) && alike(node, wanted)) return node;
    }
    return null;
  };
  const morph = (old, fresh) => {
    if (old.nodeType !== 1) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
    }
    if (old.nodeName === "TIME" && old.hasAttribute("data-ago")) return;
    if (old.nodeName === "TEXTAREA" || old.nodeName === "SELECT") return;
    const keyed = new Map();
    for (const child of old.childNodes) if (keyOf(child)) keyed.set(keyOf(child), child);
    let at = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      const key = keyOf(wanted);
      const match = key ? keyed.get(key) : near(at, wanted);
      if (!match || !alike(match, wanted)) {
        old.insertBefore(document.importNode(wanted, true), at);
        continue;
      }
      // What stands before it goes, rather than that it moves: a node that is moved loses the focus.
      while (at && at !== match && !keyOf(at)) {
        const next = at.nextSibling;
        at.remove();
        at = next;
      }
      if (at === match) at = at.nextSibling;
      else old.insertBefore(match, at);
      morph(match, wanted);
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  };

  // Live: this very page as a stream of its changes.
  const live = document.querySelector("[data-live]");
  const lamp = document.querySelector("#lamp");
  const tell = (state, text) => {
    if (!lamp) return;
    lamp.dataset.state = state;
    lamp.querySelector("span").textContent = text;
  };
  let source = null;
  const follow = () => {
    if (!live || source || document.hidden) return;
    source = new EventSource(location.pathname + location.search);
    source.onopen = () => tell("on", "Live");
    source.onmessage = (event) => {
      const sheet = document.createElement("template");
      sheet.innerHTML = JSON.parse(event.data).html;
      const fresh = sheet.content;
      const trouble = fresh.querySelector("[data-trouble]");
      const shown = document.querySelector("#trouble");
      if (shown) shown.replaceChildren(...(trouble ? [document.importNode(trouble, true)] : []));
      if (trouble) {
        tell("off", "Waiting");
        return;
      }
      tell("on", "Live");
      const holder = live.cloneNode(false);
      holder.replaceChildren(...fresh.childNodes);
      morph(live, holder);
      tellAges(live);
      countSelected();
      root.dataset.updates = String(Number(root.dataset.updates ?? 0) + 1);
    };
    source.addEventListener("over", () => { rest(); location.reload(); });
    source.onerror = () => {
      tell("off", "Reconnecting");
      if (source?.readyState !== EventSource.CLOSED) return;
      // Refused, as while the api is stopping or has as many streams as it may: the browser itself would give up.
      source = null;
      setTimeout(follow, 10_000);
    };
  };
  const rest = () => {
    source?.close();
    source = null;
    tell("off", "Paused");
  };
  // A page that nobody sees asks for nothing.
  document.addEventListener("visibilitychange", () => (document.hidden ? rest() : follow()));

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-do]");
    if (!target) return;
    if (target.dataset.do === "theme") {
      root.dataset.theme = isDark() ? "light" : "dark";
      store("penstock-theme", root.dataset.theme);
    } else if (target.dataset.do === "copy") {
      const text = document.getElementById(target.dataset.of)?.textContent ?? "";
      navigator.clipboard?.writeText(text).then(() => {
        target.textContent = "Copied";
        setTimeout(() => { target.textContent = "Copy"; }, 1500);
      });
    }
  });

  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.dataset?.all !== undefined) {
      for (const one of document.querySelectorAll("input[name=ids]")) one.checked = box.checked;
    }
    if (box.name === "ids" || box.dataset?.all !== undefined) countSelected();
    if (box.dataset?.submit !== undefined) box.form.requestSubmit();
  });
  const countSelected = () => {
    const count = document.querySelectorAll("input[name=ids]:checked").length;
    for (const label of document.querySelectorAll("[data-selected]")) label.textContent = String(count);
    document.querySelector("#selection")?.toggleAttribute("hidden", count === 0);
  };

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.nodeName ?? "");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      const field = document.querySelector("#find");
      if (field) { event.preventDefault(); field.focus(); }
    } else if (event.key === "Escape") {
      const panel = document.activeElement?.closest("details.panel[open]");
      if (panel) { panel.open = false; panel.querySelector("summary").focus(); }
    }
  });

  tellAges();
  setInterval(tellAges, 1000);
  countSelected();
  follow();
})();
