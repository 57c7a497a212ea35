// The page works without this script. It says that the LM is being asked, and keeps a form from
// being sent twice meanwhile.
"use strict";

const busy = document.getElementById("busy");

function setBusy(isBusy) {
  for (const button of document.querySelectorAll("button")) button.disabled = isBusy;
  busy.textContent = isBusy ? "Asking the language model…" : "";
}

for (const form of document.forms) {
  form.addEventListener("submit", () => setTimeout(() => setBusy(true))); // after it is on its way
}
// Ctrl+Enter sends what stands in a field of several lines.
for (const area of document.querySelectorAll("textarea")) {
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) area.form.requestSubmit();
  });
}
window.addEventListener("pageshow", () => setBusy(false)); // also after the back button
