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
  // With a viewBox a drawing can be scaled by style sheets, as the one for paper does.
  const scalable = (place) => place.querySelectorAll("svg.main-svg").forEach((svg) => {
    svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
  });
  figures.forEach((figure, number) => {
    const place = document.getElementById("chart-" + number);
    charts.push(place);
    Plotly.newPlot(place, figure.data, layoutOf(figure), config).then(() => {
      scalable(place);
      place.on("plotly_afterplot", () => scalable(place));
    });
  });
  // Paper has its own width, which no script is told: charts are drawn for columns of A4, then scaled to fit.
  const widthOnPaper = (card) => {
    const cards = [...card.parentElement.children], last = cards.length - 1;
    return cards.indexOf(card) === last && last % 2 === 0 ? 670 : 325;
  };
  window.addEventListener("beforeprint", () => charts.forEach((place) => {
    Plotly.relayout(place, { width: widthOnPaper(place.closest(".card")) });
  }));
  window.addEventListener("afterprint", () => charts.forEach((place) => {
    Plotly.relayout(place, { width: null, autosize: true });
  }));
})();
