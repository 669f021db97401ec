// The part of Markdown that models write, as elements. Nothing is ever parsed as HTML, links stay text.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const BULLET = /^(\s*)[-*+]\s+(.*)$/;
const NUMBER = /^(\s*)(\d{1,9})[.)]\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|(?<![*\w])\*(?=[^\s*])([^*]+?)(?<=\S)\*(?![*\w])/gs;

// Cuts a text into blocks, each with its source: a block whose source has not changed need not be drawn anew.
export function blocks(text) {
  const found = [];
  let lines = [], kind = null, fence = "";
  const end = () => {
    if (lines.length) found.push({ kind, source: lines.join("\n") });
    lines = [];
    kind = null;
  };
  for (const line of text.split("\n")) {
    if (kind === "code") {
      lines.push(line);
      const mark = line.trim();
      if (mark.length >= fence.length && mark === fence[0].repeat(mark.length)) end();
      continue;
    }
    const opening = FENCE.exec(line);
    if (opening) {
      end();
      kind = "code";
      fence = opening[1];
      lines.push(line);
    } else if (!line.trim()) {
      // A list goes on behind an empty line, if what follows belongs to it.
      if (kind === "list") lines.push(line);
      else end();
    } else if (RULE.test(line)) {
      end();
      found.push({ kind: "rule", source: line });
    } else if (HEADING.test(line)) {
      end();
      found.push({ kind: "heading", source: line });
    } else if (BULLET.test(line) || NUMBER.test(line)) {
      if (kind !== "list") end();
      kind = "list";
      lines.push(line);
    } else {
      if (kind === "list" && !lines.at(-1).trim() && !/^\s{2,}/.test(line)) end();
      kind ??= "paragraph";
      lines.push(line);
    }
  }
  end();
  return found;
}

export function element({ kind, source }) {
  if (kind === "code") return code(source);
  if (kind === "rule") return make("hr");
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(source);
    // Below the page's own headings, as far as there are any.
    return make(`h${Math.min(marks.length + 3, 6)}`, {}, ...inline(text));
  }
  if (kind === "list") return list(source.split("\n"));
  return make("p", {}, ...inline(source));
}

function code(source) {
  const lines = source.split("\n");
  const [, marks, language] = FENCE.exec(lines[0]);
  const last = lines.at(-1).trim();
  const closes = lines.length > 1 && last.length >= marks.length && last === marks[0].repeat(last.length);
  const text = lines.slice(1, closes ? -1 : undefined).join("\n");
  return make("pre", { tabindex: "0", role: "region", "aria-label": `Code${language ? `, ${language}` : ""}` },
    make("code", {}, text));
}

function list(lines) {
  const roots = [];
  const open = []; // the lists that a line may belong to, outermost first
  for (const line of lines) {
    const bullet = BULLET.exec(line), number = bullet ? null : NUMBER.exec(line);
    if (!bullet && !number) {
      const item = open.at(-1)?.list.lastElementChild;
      if (item && line.trim()) item.append(" ", ...inline(line.trim()));
      continue;
    }
    const indent = (bullet || number)[1].replaceAll("\t", "    ").length;
    const tag = bullet ? "ul" : "ol";
    while (open.length && (open.at(-1).indent > indent + 1 || (open.at(-1).indent >= indent - 1 && open.at(-1).tag !== tag)))
      open.pop();
    if (!open.length || open.at(-1).indent < indent - 1) {
      const made = make(tag, number && number[2] !== "1" ? { start: String(Number(number[2])) } : {});
      const parent = open.at(-1)?.list.lastElementChild;
      if (parent) parent.append(made);
      else roots.push(made);
      open.push({ list: made, indent, tag });
    }
    open.at(-1).list.append(make("li", {}, ...inline(bullet ? bullet[2] : number[3])));
  }
  return roots.length === 1 ? roots[0] : make("div", {}, ...roots);
}

function inline(text) {
  const parts = [];
  let position = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > position) parts.push(text.slice(position, match.index));
    const [all, , verbatim, strong, emphasis] = match;
    if (verbatim !== undefined) parts.push(make("code", {}, verbatim));
    else if (strong !== undefined) parts.push(make("strong", {}, ...inline(strong)));
    else parts.push(make("em", {}, emphasis));
    position = match.index + all.length;
  }
  if (position < text.length) parts.push(text.slice(position));
  return parts;
}

// A text that grows, as elements: only blocks that have changed are drawn anew.
export class Growing {
  constructor(parent) {
    this.parent = parent;
    this.drawn = [];
  }

  show(text) {
    const wanted = blocks(text);
    wanted.forEach((block, index) => {
      const before = this.drawn[index];
      if (before && before.kind === block.kind && before.source === block.source) return;
      const node = element(block);
      if (before) before.node.replaceWith(node);
      else this.parent.append(node);
      this.drawn[index] = { ...block, node };
    });
    for (const { node } of this.drawn.splice(wanted.length)) node.remove();
  }
}
