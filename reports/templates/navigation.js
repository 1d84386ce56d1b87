(() => {
  const { say } = page;

  // ---- the address names the opened case; links into closed details --------------------------------------------------
  const targetOf = (hash) => hash ? document.getElementById(decodeURIComponent(hash.slice(1))) : null;
  const caseAt = (hash) => { const target = targetOf(hash); return target && target.closest("details.case"); };
  const reveal = () => {
    const target = targetOf(location.hash);
    if (!target) return;
    const own = target.closest("details");
    for (let box = own; box; box = box.parentElement.closest("details")) box.open = true;
    (own || target).scrollIntoView({ block: "start" });
    const head = own && own.querySelector("summary");
    if (head) head.focus({ preventScroll: true });
  };
  // Entries of the history are numbered, so that going back is different from following a link, whose entry has no number yet.
  let entry = (history.state && history.state.entry) || 0, shown = location.hash;
  if (!history.state) history.replaceState({ entry }, "");
  addEventListener("hashchange", () => {
    const before = entry, left = caseAt(shown);
    if (!history.state) history.replaceState({ entry: before + 1 }, "");
    entry = history.state.entry;
    shown = location.hash;
    if (entry < before && left && left !== caseAt(shown)) left.open = false;
    // Without a target the browser itself goes back to where the reader was.
    reveal();
  });
  const follow = (box) => {
    // The click comes before the change.
    const opens = !box.open, hash = "#" + box.querySelector(".body").id;
    if (opens && location.hash !== hash) history.pushState({ entry: ++entry }, "", hash);
    else if (!opens && location.hash === hash) history.replaceState({ entry }, "", location.pathname + location.search);
    shown = location.hash;
  };
  document.addEventListener("click", (event) => {
    const summary = event.target.closest("details.case > summary");
    if (summary) follow(summary.parentElement);
    const link = event.target.closest('a[href^="#"]');
    // The same link a second time changes no hash.
    if (link && link.getAttribute("href") === location.hash) reveal();
    const button = event.target.closest(".copy");
    if (button) copy(button);
  });
  const copy = async (button) => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      if (!document.execCommand("copy")) return;
    }
    button.textContent = say("copied");
    setTimeout(() => { button.textContent = say("copy"); }, 1200);
  };
  for (const line of document.querySelectorAll(".command")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.dataset.w = "copy";
    button.textContent = say("copy");
    line.append(button);
  }
  const filter = document.getElementById("filter"), bad = document.getElementById("only-bad");
  const sift = () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(".matrix .row, details.case")) {
      const text = [...row.querySelectorAll(row.matches("tr") ? "th, .what" : "summary")].map((part) => part.textContent).join(" ");
      const fits = text.toLowerCase().includes(wanted) && !(bad.checked && row.matches(".good, .pass, .note"));
      row.hidden = !fits;
    }
    for (const body of document.querySelectorAll(".matrix tbody")) {
      const rows = body.querySelectorAll(".row");
      if (rows.length) body.hidden = ![...rows].some((row) => !row.hidden);
    }
  };
  // A page of few cases has no filter.
  if (filter) {
    filter.addEventListener("input", sift);
    bad.addEventListener("change", sift);
  }
  reveal();
})();
