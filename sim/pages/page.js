"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 640px)");
const figures = JSON.parse(document.getElementById("figures").textContent);

// What the page decides about a picture: colours by scheme, room by width.
function look(layout, traces) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink"), soft = style.getPropertyValue("--soft");
  const grid = style.getPropertyValue("--grid"), ground = style.getPropertyValue("--ground");
  const size = narrow.matches ? 11 : 12;
  const made = {
    ...layout,
    autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: ink, size, family: getComputedStyle(document.body).fontFamily},
    margin: {l: narrow.matches ? 44 : 60, r: narrow.matches ? 6 : 12, t: traces < 2 ? 14 : narrow.matches ? 64 : 48, b: 46},
    // Above the picture, in as many lines as it takes.
    legend: {orientation: "h", x: 0, xanchor: "left", y: 1, yref: "container", yanchor: "top", font: {size}, traceorder: "normal"},
    hoverlabel: {bgcolor: ground, bordercolor: grid, font: {color: ink}},
    dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
  };
  made.xaxis ??= {};
  made.yaxis ??= {};
  for (const key of Object.keys(made)) {
    if (!/^[xy]axis/.test(key)) continue;
    made[key] = {...made[key], gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true};
    if (made[key].title) made[key].title = {...made[key].title, font: {color: soft, size}};
  }
  made.annotations = (layout.annotations || []).map(note => ({...note, font: {color: soft, size: size + 1}}));
  return made;
}

async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function draw() {
  return Promise.all(figures.map(({data, layout}, i) => Plotly.react("figure" + i, data, look(layout, data.length),
    {responsive: true, displaylogo: false, displayModeBar: narrow.matches ? false : "hover"})));
}

unpack().then(draw).then(() => { document.documentElement.dataset.drawn = figures.length; });
for (const query of [dark, narrow]) query.addEventListener("change", draw);
