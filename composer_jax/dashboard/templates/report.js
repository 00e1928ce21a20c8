'use strict';
const tip = document.getElementById('tip');
const SVG = 'http://www.w3.org/2000/svg';

function show(rows, x, y) {
  tip.replaceChildren(...rows.map(([text, color]) => {
    const row = document.createElement('div');
    if (color !== undefined) {
      const dot = document.createElement('i');
      dot.style.setProperty('--c', `var(--s${color})`);
      row.append(dot);
    }
    row.append(text);
    return row;
  }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  const top = y + 14 + box.height > innerHeight ? y - 14 - box.height : y + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function draw(svg, kind, attributes) {
  const node = document.createElementNS(SVG, kind);
  for (const [key, value] of Object.entries(attributes)) {
    node.setAttribute(key, value);
  }
  svg.append(node);
}

for (const svg of document.querySelectorAll('svg[data-read]')) {
  const series = JSON.parse(svg.dataset.read);
  const clear = () => {
    svg.querySelectorAll('.cursor, .mark').forEach((node) => node.remove());
    tip.hidden = true;
  };
  const read = (event) => {
    clear();
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const near = series.map((s) => s.p.reduce(
        (a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const at = near.reduce(
        (a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    draw(svg, 'line', {class: 'cursor', x1: at[0], x2: at[0], y1: 24, y2: 196});
    near.forEach((p, i) => draw(svg, 'circle', {
      class: 'mark', cx: p[0], cy: p[1], r: 3.5,
      style: `--c:var(--s${series[i].c})`}));
    const rows = near.map((p, i) => [
      `${series[i].n}: ${p[3]}` + (p[2] === at[2] ? '' : ` (${p[2]})`),
      series[i].c]);
    show([[at[2]], ...rows], event.clientX, event.clientY);
  };
  svg.addEventListener('pointermove', read);
  svg.addEventListener('pointerdown', read);
  svg.addEventListener('pointerleave', clear);
}
