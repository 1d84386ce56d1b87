"use strict";
// What every page has: its words in both languages, the two switches, and a mark that a script runs. The event "relabel" reports
// a change of language to other scripts.
const page = (() => {
  const root = document.documentElement;
  root.classList.add("scripted");
  const data = JSON.parse(document.getElementById("data").textContent);
  const say = (name) => (data.words[name] || [name, name])[root.dataset.language === "zh" ? 1 : 0];
  // A word that its English text alone identifies has no name in the page.
  const names = Object.create(null);
  for (const name in data.words) names[data.words[name][0]] = name;
  for (const word of document.querySelectorAll('[data-w=""], th[scope="col"]:not([data-w])')) {
    // A column's header is a word even without a mark, unless it is made of several.
    if (!word.children.length && word.textContent in names) word.dataset.w = names[word.textContent];
  }
  const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* a page from disk may have no storage */ } };
  const recall = (key) => { try { return localStorage.getItem(key); } catch { return null; } };
  // ?lang= in the address comes first, then what was chosen here before, then the browser's own language.
  const address = new URL(location.href);
  const first = {
    language: () => address.searchParams.get("lang") || recall("hyper_resume-language") || (/^zh\b/i.test(navigator.language) ? "zh" : "en"),
    theme: () => recall("hyper_resume-theme"),
  };
  const usual = { language: "en", theme: "auto" };
  const apply = {
    language: (value) => {
      root.dataset.language = value;
      root.lang = value === "zh" ? "zh-Hans" : "en";
      for (const word of document.querySelectorAll("[data-w]")) word.textContent = say(word.dataset.w);
    },
    theme: (value) => { if (value === "auto") delete root.dataset.theme; else root.dataset.theme = value; },
  };
  for (const box of document.querySelectorAll(".switch")) {
    const kind = box.dataset.switch;
    const choose = (value) => {
      apply[kind](value);
      for (const button of box.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.value === value));
      document.dispatchEvent(new Event("relabel"));
    };
    box.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      choose(button.dataset.value);
      remember("hyper_resume-" + kind, button.dataset.value);
      const now = new URL(location.href);
      if (kind === "language" && now.searchParams.has("lang")) {
        // The address would win over the choice when the page is loaded again.
        now.searchParams.set("lang", button.dataset.value);
        try { history.replaceState(history.state, "", now); } catch { /* a page from disk may not change its address */ }
      }
    });
    const wanted = first[kind]();
    choose(wanted && box.querySelector(`[data-value="${CSS.escape(wanted)}"]`) ? wanted : usual[kind]);
  }
  return { data, say };
})();
