// Polling, as long as the page is looked at.

/** Call `ask` now and then again and again, `seconds` after it has ended, while the tab is visible and `signal` is quiet. */
export async function poll(ask, seconds, signal) {
  const pulse = document.getElementById("pulse");
  for (;;) {
    try {
      await ask();
      pulse.textContent = "";
    } catch (why) {
      if (why.name === "AbortError" || signal.aborted) return;
      pulse.textContent = `${why.message}; trying again`;
    }
    await rest(seconds, signal);
    if (signal.aborted) return;
  }
}

async function rest(seconds, signal) {
  await new Promise((done) => {
    const timer = setTimeout(done, seconds * 1000);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
  if (!document.hidden || signal.aborted) return;
  await new Promise((done) => {
    document.addEventListener("visibilitychange", done, { once: true });
    signal.addEventListener("abort", done, { once: true });
  });
}

/** Move the focus among rows that hold a link, by keys; says whether it was one of its keys. */
export function walkRows(event, rows) {
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (!step || !rows.length) return false;
  const here = rows.indexOf(document.activeElement);
  const next = rows[here < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(here + step, 0), rows.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}
