// Before anything is painted: the theme that was chosen here, if one was; else the system's counts.
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; then nothing was chosen.
}
