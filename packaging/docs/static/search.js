// Finds the pages that have most words of a pasted message, rare words before common ones: it has
// paths and names of its own, and Sphinx would look for a page with all of them.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // on no page but that of the search
  const pagesWith = Search.performTermsSearch;
  Search.performTermsSearch = (words, excluded) => {
    const found = new Map();
    for (const word of words) {
      const pages = pagesWith(new Set([word]), excluded);
      for (const page of pages) {
        const sum = found.get(page[0]) ?? [...page.slice(0, 4), 0, ...page.slice(5)];
        sum[4] += page[4] / pages.length;
        found.set(page[0], sum);
      }
    }
    const best = Math.max(...[...found.values()].map((page) => page[4]));
    return [...found.values()].filter((page) => page[4] >= best / 2);
  };
});
