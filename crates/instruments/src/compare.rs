//! Two models, or one with two settings, fed the same tokens: how far apart their logits, losses and routes are.

use std::collections::BTreeMap;

use engine::{Probe, Routes, greedy};

use crate::routing::Ratio;

/// Sums over rows of logits of two sides. All are f64, in the order of rows and then of ids, so that the same logits give the same
/// bits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogitsTally {
    rows: u64,
    numbers: u64,
    largest: f64,
    squares: f64,
    divergence: f64,
    agreed: u64,
    predicted: u64,
    losses: [f64; 2],
}

impl LogitsTally {
    /// Counts the logits after one token, of both sides, and how likely each found `next`, the token that follows in the text.
    ///
    /// # Panics
    ///
    /// When the two differ in length or `next` is beyond them.
    pub fn add(&mut self, one: &[f32], other: &[f32], next: Option<u32>) {
        assert_eq!(one.len(), other.len(), "logits over one vocabulary");
        self.rows += 1;
        self.numbers += one.len() as u64;
        self.agreed += u64::from(greedy(one) == greedy(other));
        let [norm, other_norm] = [one, other].map(log_sum_exp);
        for (&a, &b) in one.iter().zip(other) {
            let (a, b) = (f64::from(a), f64::from(b));
            self.largest = self.largest.max((a - b).abs());
            self.squares += (a - b) * (a - b);
            let log_p = a - norm;
            self.divergence += log_p.exp() * (log_p - (b - other_norm));
        }
        if let Some(next) = next {
            self.predicted += 1;
            for (loss, (logits, norm)) in self.losses.iter_mut().zip([(one, norm), (other, other_norm)]) {
                *loss += norm - f64::from(logits[next as usize]);
            }
        }
    }

    /// Rows counted.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Rows with a token that follows.
    pub fn predicted(&self) -> u64 {
        self.predicted
    }

    /// The largest difference of two logits.
    pub fn largest(&self) -> f64 {
        self.largest
    }

    /// The root of the mean square of all differences; nothing before the first row.
    pub fn root_mean_square(&self) -> Option<f64> {
        (self.numbers > 0).then(|| (self.squares / self.numbers as f64).sqrt())
    }

    /// The mean Kullback-Leibler divergence of the other side from the one, in nats a row.
    pub fn divergence(&self) -> Option<f64> {
        (self.rows > 0).then(|| self.divergence / self.rows as f64)
    }

    /// Rows whose most likely token is the same.
    pub fn agreement(&self) -> Ratio {
        Ratio {
            hits: self.agreed,
            of: self.rows,
        }
    }

    /// The mean negative log-likelihood of the tokens that follow, in nats, of both sides.
    pub fn losses(&self) -> Option<[f64; 2]> {
        (self.predicted > 0).then(|| self.losses.map(|loss| loss / self.predicted as f64))
    }
}

/// The logarithm of the sum of exponentials.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    largest + sum.ln()
}

/// Keeps all routes of the passes that it watches: for each layer the experts of its rows, one row after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteLog {
    top_k: usize,
    layers: BTreeMap<usize, Vec<u32>>,
}

impl RouteLog {
    /// Adds the routes of consecutive rows.
    pub fn add(&mut self, layer: usize, routes: &Routes) {
        self.top_k = routes.top_k;
        self.layers.entry(layer).or_default().extend(&routes.experts);
    }

    /// How far the routes of the same rows agree, layer by layer, ascending.
    pub fn compare(&self, other: &Self) -> Vec<LayerAgreement> {
        let width = self.top_k.max(1);
        let layers = self.layers.iter().zip(other.layers.values());
        layers
            .map(|((&layer, one), other)| {
                let mut agreement = LayerAgreement {
                    layer,
                    ..LayerAgreement::default()
                };
                for (one, other) in one.chunks_exact(width).zip(other.chunks_exact(width)) {
                    agreement.sets.hits += u64::from(one == other);
                    agreement.sets.of += 1;
                    agreement.experts.count(one, other);
                }
                agreement
            })
            .collect()
    }
}

impl Probe for RouteLog {
    fn layer(&mut self, layer: usize, _: &[f32], routes: Option<&Routes>) {
        if let Some(routes) = routes {
            self.add(layer, routes);
        }
    }

    fn wants_streams(&self) -> bool {
        false
    }
}

/// How far the routes of one layer agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerAgreement {
    /// The layer, numbered from 0 as in the checkpoint's tensor names.
    pub layer: usize,
    /// Rows whose experts are all the same.
    pub sets: Ratio,
    /// Of all experts of all rows, those that the other side chose too.
    pub experts: Ratio,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: f64, want: f64) {
        assert!((got - want).abs() <= 1e-12 * want.abs().max(1.0), "{got} for {want}");
    }

    #[test]
    fn the_same_logits_are_exactly_as_far_apart_as_nothing() {
        let logits = [0.3f32, -7.25, 88.0, 1e-30, -1e30];
        let mut tally = LogitsTally::default();
        tally.add(&logits, &logits, Some(1));
        tally.add(&logits, &logits, None);
        assert_eq!((tally.rows(), tally.predicted(), tally.largest()), (2, 1, 0.0));
        assert_eq!((tally.root_mean_square(), tally.divergence()), (Some(0.0), Some(0.0)));
        assert_eq!(tally.agreement(), Ratio { hits: 2, of: 2 });
        let [one, other] = tally.losses().unwrap();
        assert_eq!(one.to_bits(), other.to_bits());
        near(one, 95.25);
    }

    #[test]
    fn numbers_are_those_of_the_formulas() {
        // Probabilities of 1/2, 1/4, 1/4 against 1/4, 1/2, 1/4.
        let (one, other) = ([2f32.ln(), 0.0, 0.0], [0.0, 2f32.ln(), 0.0]);
        let mut tally = LogitsTally::default();
        tally.add(&one, &other, Some(0));
        let ln2 = f64::from(2f32.ln());
        near(tally.largest(), ln2);
        near(tally.root_mean_square().unwrap(), (2.0 * ln2 * ln2 / 3.0).sqrt());
        let p = ln2.exp() / (ln2.exp() + 2.0);
        near(tally.divergence().unwrap(), p * ln2 - (1.0 - p) / 2.0 * ln2);
        assert_eq!(tally.agreement(), Ratio { hits: 0, of: 1 });
        let [loss, other_loss] = tally.losses().unwrap();
        near(loss, -p.ln());
        near(other_loss - loss, ln2);
        let nothing = LogitsTally::default();
        assert_eq!(
            (nothing.divergence(), nothing.losses(), nothing.root_mean_square()),
            (None, None, None)
        );
    }

    #[test]
    fn adding_a_constant_moves_logits_and_nothing_else() {
        let mut tally = LogitsTally::default();
        tally.add(&[1.0, 2.0, 4.0], &[2.0, 3.0, 5.0], Some(2));
        assert_eq!(tally.largest(), 1.0);
        near(tally.root_mean_square().unwrap(), 1.0);
        near(tally.divergence().unwrap(), 0.0);
        let [one, other] = tally.losses().unwrap();
        near(one, other);
    }

    #[test]
    fn routes_are_counted_by_row_and_by_expert() {
        let routes = |experts: &[u32]| Routes {
            top_k: 2,
            experts: experts.to_vec(),
            weights: vec![0.5; experts.len()],
        };
        let (mut one, mut other) = (RouteLog::default(), RouteLog::default());
        // In passes of any size.
        one.layer(1, &[], Some(&routes(&[0, 1])));
        one.layer(1, &[], Some(&routes(&[2, 3, 4, 5])));
        one.layer(0, &[], None);
        one.layer(7, &[], Some(&routes(&[0, 1, 0, 1, 0, 1])));
        other.layer(1, &[], Some(&routes(&[0, 1, 2, 4, 6, 7])));
        other.layer(7, &[], Some(&routes(&[0, 1, 0, 1, 0, 1])));
        let ratio = |hits, of| Ratio { hits, of };
        let layer = |layer, sets, experts| LayerAgreement { layer, sets, experts };
        assert_eq!(
            one.compare(&other),
            [layer(1, ratio(1, 3), ratio(3, 6)), layer(7, ratio(3, 3), ratio(6, 6))]
        );
    }
}
