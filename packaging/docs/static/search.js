// A message is found as it was pasted: its paths are not looked for, and a page counts that has some
// of its words, most if it has rare ones or is of those on what fails. Sphinx would look for a page
// that has all words.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // on no page but that of the search
  const { _parseQuery: parse, performTermsSearch: pagesWith } = Search;
  const ownNames = /\S*\/\S*|\b\w{1,2}\b/g; // short ones are those of nodes, or units
  Search._parseQuery = (text) => parse(text.replace(ownNames, " ").trim() || text);
  Search.performTermsSearch = (words, excluded) => {
    if (words.size < 2) return pagesWith(words, excluded);
    const found = new Map();
    for (const word of words) {
      const pages = pagesWith(new Set([word]), excluded);
      for (const page of pages) {
        const sum = found.get(page[0]) ?? [...page.slice(0, 4), 0, ...page.slice(5)];
        sum[4] += (page[0].includes("/trouble/") ? 2 : 1) / Math.sqrt(pages.length);
        found.set(page[0], sum);
      }
    }
    const best = Math.max(...[...found.values()].map((page) => page[4]));
    return [...found.values()].filter((page) => page[4] >= best / 2);
  };
});
