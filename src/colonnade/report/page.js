"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const grid = "rgba(128,138,150,0.22)", ink = "#788492";
  const axis = (given, more) => Object.assign({
    gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, tickfont: { size: 11 },
    fixedrange: true, separatethousands: true,
  }, more, given, { title: Object.assign({ font: { size: 12 }, standoff: 8 }, given.title) });
  const layoutOf = (figure) => Object.assign({
    margin: { l: 8, r: 10, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", size: 12, color: ink },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 12 } },
    hoverlabel: { font: { size: 12 } }, bargap: 0.28, autosize: true, uniformtext: { minsize: 9 },
  }, figure.layout, { xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis) });
  const config = { displayModeBar: false, responsive: true, scrollZoom: false };
  const charts = [];
  figures.forEach((figure, number) => {
    const place = document.getElementById("chart-" + number);
    charts.push(place);
    Plotly.newPlot(place, figure.data, layoutOf(figure), config);
  });
  // Paper has its own width: charts are drawn for it, and for the screen again afterwards.
  const fit = () => charts.forEach((place) => {
    Plotly.relayout(place, { width: place.clientWidth, "font.color": ink });
  });
  const unfit = () => charts.forEach((place) => Plotly.relayout(place, { width: null, autosize: true }));
  window.addEventListener("beforeprint", fit);
  window.addEventListener("afterprint", unfit);
})();
