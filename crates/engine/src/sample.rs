//! From logits to a token. The same seed gives the same tokens on every machine: probabilities come from the kernels' own
//! exponential, and the n-th token of a request takes the n-th number of the seed's sequence.

use std::cmp::Ordering;

/// How a token is chosen. The filters apply in the order of the fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token, ties to the lower id.
    pub temperature: f32,
    /// Keeps the most likely tokens, this many; 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens at least this likely relative to the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Keeps the most likely tokens until their share reaches this; 1 keeps all.
    pub top_p: f32,
    /// Chooses the sequence of random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            min_p: 0.0,
            top_p: 1.0,
            seed: 0,
        }
    }
}

/// Chooses the tokens of one request.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    drawn: u64,
}

impl Sampler {
    /// A sampler before its first token.
    pub fn new(sampling: Sampling) -> Self {
        Self { sampling, drawn: 0 }
    }

    /// The next token.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        let draw = uniform(self.sampling.seed, self.drawn);
        self.drawn += 1;
        if self.sampling.temperature == 0.0 {
            return greedy(logits);
        }
        pick(&candidates(logits, &self.sampling), draw)
    }
}

/// The index of the largest logit, ties to the lower id. NaN never wins.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] || logits[best].is_nan() {
            best = id;
        }
    }
    best as u32
}

/// Tokens that survive the filters with their unnormalised probabilities, most likely first.
fn candidates(logits: &[f32], s: &Sampling) -> Vec<(u32, f32)> {
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0));
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).filter(|(_, l)| !l.is_nan()).collect();
    if s.top_k > 0 && s.top_k < all.len() {
        all.select_nth_unstable_by(s.top_k, order);
        all.truncate(s.top_k);
    }
    all.sort_unstable_by(order);
    let Some(&(_, max)) = all.first() else {
        return vec![(0, 1.0)];
    };
    for (_, value) in &mut all {
        *value = kernels::exp((*value - max) / s.temperature);
    }
    all.retain(|(_, p)| *p >= s.min_p);
    if s.top_p < 1.0 {
        let total: f64 = all.iter().map(|(_, p)| *p as f64).sum();
        let mut sum = 0.0;
        let reached = all.iter().position(|(_, p)| {
            sum += *p as f64;
            sum >= s.top_p as f64 * total
        });
        all.truncate(reached.map_or(all.len(), |last| last + 1));
    }
    all
}

/// The candidate at which the running sum passes `draw` of the total.
fn pick(candidates: &[(u32, f32)], draw: f64) -> u32 {
    let total: f64 = candidates.iter().map(|(_, p)| *p as f64).sum();
    let mut sum = 0.0;
    for (id, p) in candidates {
        sum += *p as f64;
        if sum > draw * total {
            return *id;
        }
    }
    candidates.last().map_or(0, |(id, _)| *id)
}

/// The n-th number in [0, 1) of a seed's sequence: splitmix64 (Steele, Lea, Flood 2014), 53 bits.
fn uniform(seed: u64, n: u64) -> f64 {
    let mut z = seed.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, 3.0, -1.0];

    fn sampling(temperature: f32) -> Sampling {
        Sampling {
            temperature,
            ..Default::default()
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(Sampler::new(sampling(0.0)).choose(&LOGITS), 1);
        assert_eq!(greedy(&[f32::NAN, 1.0, f32::NAN, 2.0]), 3);
    }

    #[test]
    fn filters_keep_what_they_say() {
        let ids = |s: Sampling| {
            candidates(&LOGITS, &s)
                .into_iter()
                .map(|(id, _)| id)
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(sampling(1.0)), [1, 3, 2, 0, 4]);
        assert_eq!(
            ids(Sampling {
                top_k: 3,
                ..sampling(1.0)
            }),
            [1, 3, 2]
        );
        assert_eq!(
            ids(Sampling {
                min_p: 0.3,
                ..sampling(1.0)
            }),
            [1, 3, 2]
        );
        assert_eq!(
            ids(Sampling {
                min_p: 1.0,
                ..sampling(1.0)
            }),
            [1, 3]
        );
        // e^0, e^0, e^-1, e^-2, e^-4: shares 0.398, 0.398, 0.146, ...
        assert_eq!(
            ids(Sampling {
                top_p: 0.39,
                ..sampling(1.0)
            }),
            [1]
        );
        assert_eq!(
            ids(Sampling {
                top_p: 0.5,
                ..sampling(1.0)
            }),
            [1, 3]
        );
        assert_eq!(
            ids(Sampling {
                top_p: 0.9,
                ..sampling(1.0)
            }),
            [1, 3, 2]
        );
    }

    #[test]
    fn frequencies_follow_the_softmax_and_seeds_repeat() {
        let run = |seed| {
            let mut sampler = Sampler::new(Sampling { seed, ..sampling(1.0) });
            (0..20_000).map(|_| sampler.choose(&LOGITS)).collect::<Vec<_>>()
        };
        let tokens = run(7);
        assert_eq!(tokens, run(7));
        assert_ne!(tokens, run(8));
        let total: f64 = LOGITS.iter().map(|l| (*l as f64).exp()).sum();
        for (id, logit) in LOGITS.iter().enumerate() {
            let share = tokens.iter().filter(|t| **t == id as u32).count() as f64 / tokens.len() as f64;
            assert!(
                (share - (*logit as f64).exp() / total).abs() < 0.01,
                "token {id}: {share}"
            );
        }
    }
}
