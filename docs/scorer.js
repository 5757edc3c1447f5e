// Weights of Sphinx's search. A page or section named like the query comes before pages that mention its word in some heading.
var Scorer = {
  score: ([, , anchor, , score, , kind]) => (kind === "title" ? (anchor ? 2 : 3) * score : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
