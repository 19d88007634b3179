// Polls while the page is visible, and moves the focus between rows.

/** Call `ask` now, and again `seconds` after each call has ended, while the tab is visible and until `signal` aborts. */
export async function poll(ask, seconds, signal) {
  const pulse = document.getElementById("pulse");
  for (;;) {
    try {
      await ask();
      pulse.textContent = "";
    } catch (why) {
      if (why.name === "AbortError" || signal.aborted) return;
      pulse.textContent = `${why.message}; retrying`;
    }
    await rest(seconds, signal);
    if (signal.aborted) return;
  }
}

async function rest(seconds, signal) {
  const rested = new AbortController(); // removes the listeners: `signal` outlives many rests
  let timer;
  await new Promise((done) => {
    timer = setTimeout(done, seconds * 1000);
    signal.addEventListener("abort", done, { signal: rested.signal });
  });
  clearTimeout(timer);
  if (document.hidden && !signal.aborted) {
    await new Promise((done) => {
      document.addEventListener("visibilitychange", done, { signal: rested.signal });
      signal.addEventListener("abort", done, { signal: rested.signal });
    });
  }
  rested.abort();
}

/** Move the focus between rows that contain a link, with j, k and the arrow keys. Returns whether the event was one of these keys. */
export function walkRows(event, rows) {
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (!step || !rows.length) return false;
  const here = rows.indexOf(document.activeElement);
  const next = rows[here < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(Math.max(here + step, 0), rows.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}
