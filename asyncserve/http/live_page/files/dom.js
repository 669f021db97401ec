// Elements and numbers. Text is only ever inserted as text.

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const make = (tag, attributes = {}, ...children) =>
  build(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS(SVG, tag), attributes, children);

// What has not changed is not written: it would be laid out, and read out, again.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const hundredths = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

export const count = (value) => whole.format(value);
export const rate = (value) => (value > 0 && value < 100 ? tenths : whole).format(value);
export const percent = (share) => `${(share > 0 && share < 0.1 ? tenths : whole).format(share * 100)} %`;

export function duration(milliseconds) {
  if (milliseconds >= 10_000) return `${tenths.format(milliseconds / 1000)} s`;
  if (milliseconds >= 1000) return `${hundredths.format(milliseconds / 1000)} s`;
  if (milliseconds >= 100) return `${whole.format(milliseconds)} ms`;
  return `${(milliseconds >= 1 ? tenths : hundredths).format(milliseconds)} ms`;
}
