"use strict";
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.wattline = {
  // The address of the page as its controls stand; the address bar follows.
  link(values, ids) {
    const query = new URLSearchParams();
    ids.forEach((id, i) => {
      const value = Array.isArray(values[i]) ? (values[i].length ? "true" : null) : values[i];
      if (value !== null && value !== undefined && value !== "") query.append(`${id.side}.${id.field}`, value);
    });
    const address = `${location.pathname}?${query}`;
    history.replaceState(null, "", address);
    return address;
  },
  // Timeline and roofline, by the id of their place.
  draw(pictures) {
    Object.entries(pictures || {}).forEach(([id, html]) => {
      document.getElementById(id).innerHTML = html;
    });
    return performance.now();
  },
};

// As the report's pages do: the viewer runs in the browser, the trace is handed to it there and uploaded nowhere.
const VIEWER = "https://ui.perfetto.dev";
document.addEventListener("click", async event => {
  const button = event.target.closest("button.perfetto");
  if (!button) return;
  const viewer = window.open(VIEWER);
  const answer = await fetch(button.dataset.trace);
  if (!viewer || !answer.ok) return;
  const buffer = await answer.arrayBuffer();
  const timer = setInterval(() => viewer.postMessage("PING", VIEWER), 100);
  window.addEventListener("message", function ready(message) {
    if (message.source !== viewer || message.data !== "PONG") return;
    clearInterval(timer);
    window.removeEventListener("message", ready);
    viewer.postMessage({perfetto: {buffer, title: button.dataset.title}}, VIEWER);
  });
});
