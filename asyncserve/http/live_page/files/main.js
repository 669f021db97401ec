// The page's parts, put together: theme, key, facts of the server, chat, pipeline.

import { loadModels, startChat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { restart, startPipeline } from "./pipeline.js";
import { storeKey, storedKey } from "./server.js";

const root = document.documentElement, theme = byId("theme");
const system = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  theme.setAttribute("aria-pressed", String(isDark));
}

theme.addEventListener("click", () => {
  const wanted = theme.getAttribute("aria-pressed") === "true" ? "light" : "dark";
  const isSystems = (wanted === "dark") === system.matches;
  if (isSystems) delete root.dataset.theme;
  else root.dataset.theme = wanted;
  try {
    isSystems ? localStorage.removeItem("theme") : localStorage.setItem("theme", wanted);
  } catch { /* it holds for this page, then */ }
  showTheme();
});
system.addEventListener("change", showTheme);

const keyForm = byId("keyform"), key = byId("key");

document.addEventListener("keyneeded", ({ detail }) => {
  if (!keyForm.hidden && !detail.given) return;
  keyForm.hidden = false;
  setText(byId("keyhelp"), detail.given
    ? "That is not one of this server's keys."
    : "This server asks for a key. It stays in this tab and is sent to this server alone.");
  key.focus();
});

keyForm.addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  storeKey(key.value.trim());
  keyForm.hidden = true;
  key.value = "";
  load();
});

byId("forget-key").addEventListener("click", () => {
  storeKey("");
  load();
});

document.addEventListener("facts", ({ detail }) => {
  setText(byId("served-model"), detail.model);
  setText(byId("served-device"), [detail.device, detail.version].filter(Boolean).join(" · "));
  document.title = `${detail.model} · asyncserve`;
  // Before the model is loaded its names cannot be asked for.
  if (detail.device !== undefined && byId("model").disabled) loadModels().catch(() => {});
});

function load() {
  byId("forget").hidden = !storedKey();
  loadModels().catch(() => {});
  restart();
}

showTheme();
startChat();
startPipeline();
load();
