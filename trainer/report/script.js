// Shows the values under the pointer. Everything else on the page works without scripts.
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

function nearest(places, wanted) {
  let low = 0, high = places.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - places[low] < places[high] - wanted ? low : high;
}

function element(parent, name, className, style) {
  const made = parent.appendChild(document.createElement(name));
  made.className = className;
  Object.assign(made.style, style);
  return made;
}

function show(area, chart, axis, wanted) {
  const found = chart.curves.flatMap((curve, i) => {
    const x = axis.x[i];
    if (!x.length || wanted < x[0] - axis.end * 0.02) return [];
    const at = nearest(x, wanted);
    return curve.y[at] === null ? [] : [{ ...curve, x: x[at], value: curve.y[at] }];
  });
  if (!found.length) return;
  const share = found[0].x / axis.end;
  element(area, "span", "hover hair", { left: `${share * 100}%` });
  const tip = element(area, "div", "hover tip",
    share > 0.5 ? { right: `calc(${(1 - share) * 100}% + 12px)` } : { left: `calc(${share * 100}% + 12px)` });
  const head = element(tip, "div", "", {});
  head.textContent = axis.unit === "steps" ? `step ${Math.round(found[0].x).toLocaleString("en")}`
    : `${compact.format(found[0].x)} ${axis.unit}`;
  for (const one of found) {
    const colour = `var(--c${one.colour})`;
    const dot = element(area, "span", "hover at", {
      left: `${(one.x / axis.end) * 100}%`,
      top: `${((one.value - chart.top) / (chart.bottom - chart.top)) * 100}%`,
    });
    dot.style.setProperty("--c", colour);
    const line = element(tip, "div", "", {});
    element(line, "i", "", {}).style.setProperty("--c", colour);
    const value = chart.shares ? `${(one.value * 100).toFixed(1)}%` : number.format(one.value);
    line.append(`${one.name} ${value}`);
  }
}

for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const chart = JSON.parse(figure.dataset.hover);
  for (const plot of figure.querySelectorAll(".plot")) {
    const axis = chart.axes[plot.dataset.axis];
    const area = plot.querySelector(".area");
    const clear = () => area.querySelectorAll(".hover").forEach((one) => one.remove());
    area.addEventListener("pointerleave", clear);
    for (const kind of ["pointermove", "pointerdown"]) {
      area.addEventListener(kind, (event) => {
        const box = area.getBoundingClientRect();
        clear();
        show(area, chart, axis, ((event.clientX - box.left) / box.width) * axis.end);
      });
    }
  }
}
