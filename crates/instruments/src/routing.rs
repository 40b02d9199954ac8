//! How tokens are routed: skew, repetition, and what can be known one layer ahead.

use engine::{Probe, Routes};

/// So many of so many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ratio {
    /// Those that count.
    pub hits: u64,
    /// All.
    pub of: u64,
}

impl Ratio {
    /// The quotient; nothing where there was nothing to count.
    pub fn value(self) -> Option<f64> {
        (self.of > 0).then(|| self.hits as f64 / self.of as f64)
    }

    /// Both counts of many ratios together.
    pub fn sum(ratios: impl IntoIterator<Item = Ratio>) -> Ratio {
        ratios.into_iter().fold(Ratio::default(), |sum, r| Ratio {
            hits: sum.hits + r.hits,
            of: sum.of + r.of,
        })
    }

    /// Counts the experts of `wanted` that are among `had`; both ascending.
    pub(crate) fn count(&mut self, wanted: &[u32], had: &[u32]) {
        self.hits += wanted.iter().filter(|e| had.binary_search(e).is_ok()).count() as u64;
        self.of += wanted.len() as u64;
    }
}

/// What was counted in one layer. A read is one token's need of one expert: what decoding one sequence without a cache reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRouting {
    /// The layer, numbered from 0 as in the checkpoint's tensor names.
    pub layer: usize,
    /// Reads of each expert.
    pub reads: Vec<u64>,
    /// Of the reads of all tokens but each sequence's first: those of experts that the token before used in this layer.
    pub repeat: Ratio,
    /// For each width: of the reads for which there was a guess, those of guessed experts.
    pub recall: Vec<Ratio>,
}

/// Counts routes as passes go by. The rows of a pass must be those of one sequence, which may take any number of passes.
#[derive(Clone, Debug)]
pub struct RoutingTally {
    experts: usize,
    widths: Vec<usize>,
    layers: Vec<LayerRouting>,
    /// For each of `layers`, the experts of the sequence's last token, ascending; none before its first.
    last: Vec<Vec<u32>>,
    /// Guesses that have not met their layer.
    guesses: Option<(usize, Vec<Routes>)>,
}

impl RoutingTally {
    /// Counts for layers of `experts` experts, and guesses of each of `widths` experts a token.
    pub fn new(experts: usize, widths: &[usize]) -> Self {
        Self {
            experts,
            widths: widths.to_vec(),
            layers: vec![],
            last: vec![],
            guesses: None,
        }
    }

    /// What comes now follows no token.
    pub fn begin_sequence(&mut self) {
        self.last.iter_mut().for_each(Vec::clear);
        self.guesses = None;
    }

    /// Counts consecutive tokens in one layer, with the guesses that were made for them: one for each width, or none.
    ///
    /// # Panics
    ///
    /// If an expert is beyond the number of experts.
    pub fn add(&mut self, layer: usize, routes: &Routes, guesses: &[Routes]) {
        let place = self.place(layer);
        let (counts, last) = (&mut self.layers[place], &mut self.last[place]);
        for experts in rows(routes) {
            for &expert in experts {
                counts.reads[expert as usize] += 1;
            }
            if !last.is_empty() {
                counts.repeat.count(experts, last);
            }
            last.clear();
            last.extend_from_slice(experts);
        }
        for (recall, guess) in counts.recall.iter_mut().zip(guesses) {
            for (experts, guessed) in rows(routes).zip(rows(guess)) {
                recall.count(experts, guessed);
            }
        }
    }

    /// The layers with a router that were seen, ascending.
    pub fn layers(&self) -> &[LayerRouting] {
        &self.layers
    }

    /// Where the counts of `layer` are.
    fn place(&mut self, layer: usize) -> usize {
        self.layers
            .binary_search_by_key(&layer, |l| l.layer)
            .unwrap_or_else(|place| {
                let counts = LayerRouting {
                    layer,
                    reads: vec![0; self.experts],
                    repeat: Ratio::default(),
                    recall: vec![Ratio::default(); self.widths.len()],
                };
                self.layers.insert(place, counts);
                self.last.insert(place, vec![]);
                place
            })
    }
}

impl Probe for RoutingTally {
    fn layer(&mut self, layer: usize, _stream: &[f32], routes: Option<&Routes>) {
        let guesses = self.guesses.take().filter(|(guessed, _)| *guessed == layer);
        if let Some(routes) = routes {
            self.add(layer, routes, guesses.as_ref().map_or(&[], |(_, guesses)| guesses));
        }
    }

    fn guess_widths(&self) -> &[usize] {
        &self.widths
    }

    fn guesses(&mut self, layer: usize, guesses: &[Routes]) {
        self.guesses = Some((layer, guesses.to_vec()));
    }
}

/// The experts of each row.
fn rows(routes: &Routes) -> impl Iterator<Item = &[u32]> {
    routes.experts.chunks_exact(routes.top_k.max(1))
}

/// The share of all reads that falls on the most read `part` of the experts, 0 to 1. Where `part` ends inside an expert, that
/// expert counts by the fraction, so that even reads give `part` for any number of experts. Nothing where nothing was read.
pub fn top_share(reads: &[u64], part: f64) -> Option<f64> {
    let total: u64 = reads.iter().sum();
    let mut falling = reads.to_vec();
    falling.sort_unstable_by(|a, b| b.cmp(a));
    let room = part * reads.len() as f64;
    let counted = falling.iter().enumerate();
    let on_top: f64 = counted
        .map(|(rank, &n)| n as f64 * (room - rank as f64).clamp(0.0, 1.0))
        .sum();
    (total > 0).then(|| on_top / total as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(top_k: usize, experts: &[u32]) -> Routes {
        Routes {
            top_k,
            experts: experts.to_vec(),
            weights: vec![1.0; experts.len()],
        }
    }

    fn ratio(hits: u64, of: u64) -> Ratio {
        Ratio { hits, of }
    }

    #[test]
    fn shares_of_the_most_read() {
        let near = |reads: &[u64], part, want: f64| {
            let got = top_share(reads, part).unwrap();
            assert!((got - want).abs() < 1e-12, "{reads:?} {part}: {got} for {want}");
        };
        near(&[0, 6, 1, 1], 0.25, 0.75);
        near(&[0, 6, 1, 1], 0.5, 0.875);
        near(&[0, 6, 1, 1], 1.0, 1.0);
        near(&[0, 6, 1, 1], 0.125, 0.375);
        near(&[0, 6, 1, 1], 0.375, 0.8125);
        near(&[3; 64], 0.1, 0.1);
        near(&[5; 7], 0.1, 0.1);
        assert_eq!(top_share(&[0, 0], 0.5), None);
        assert_eq!(top_share(&[], 0.5), None);
    }

    #[test]
    fn repeats_go_on_over_passes_and_end_with_the_sequence() {
        let mut tally = RoutingTally::new(6, &[]);
        tally.add(3, &routes(2, &[0, 1, 1, 2, 3, 4]), &[]);
        assert_eq!(tally.layers()[0].repeat, ratio(1, 4));
        tally.add(3, &routes(2, &[3, 4]), &[]);
        assert_eq!(tally.layers()[0].repeat, ratio(3, 6));
        tally.begin_sequence();
        tally.add(3, &routes(2, &[3, 4, 4, 5]), &[]);
        assert_eq!(tally.layers()[0].repeat, ratio(4, 8));
        assert_eq!(tally.layers()[0].reads, [1, 2, 1, 3, 4, 1]);
        // Another layer knows nothing of this one.
        tally.add(1, &routes(2, &[3, 4]), &[]);
        let layers: Vec<(usize, Ratio)> = tally.layers().iter().map(|l| (l.layer, l.repeat)).collect();
        assert_eq!(layers, [(1, ratio(0, 0)), (3, ratio(4, 8))]);
        assert_eq!(Ratio::sum(layers.iter().map(|l| l.1)).value(), Some(0.5));
        assert_eq!(ratio(0, 0).value(), None);
    }

    #[test]
    fn recall_is_counted_for_each_width() {
        let mut tally = RoutingTally::new(8, &[2, 3]);
        let came = routes(2, &[0, 1, 5, 7]);
        let guesses = [routes(2, &[0, 2, 6, 7]), routes(3, &[0, 1, 2, 5, 6, 7])];
        tally.add(2, &came, &guesses);
        assert_eq!(tally.layers()[0].recall, [ratio(2, 4), ratio(4, 4)]);
        tally.add(2, &came, &[]);
        assert_eq!(tally.layers()[0].recall, [ratio(2, 4), ratio(4, 4)]);
    }

    #[test]
    fn as_a_probe_it_matches_guesses_with_their_layer() {
        let mut tally = RoutingTally::new(4, &[1]);
        assert_eq!(tally.guess_widths(), [1]);
        tally.layer(0, &[], None);
        tally.guesses(1, &[routes(1, &[3])]);
        tally.layer(1, &[], Some(&routes(1, &[3])));
        // No guess came for layer 2, and one for layer 3 is not for layer 4.
        tally.layer(2, &[], Some(&routes(1, &[3])));
        tally.guesses(3, &[routes(1, &[3])]);
        tally.layer(4, &[], Some(&routes(1, &[3])));
        let recall: Vec<Ratio> = tally.layers().iter().map(|l| l.recall[0]).collect();
        assert_eq!(recall, [ratio(1, 1), ratio(0, 0), ratio(0, 0)]);
    }
}
