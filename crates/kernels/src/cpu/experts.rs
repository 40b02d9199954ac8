use super::{Cpu, Rows, with_packed};
use crate::backend::{ExpertMatrices, ExpertWork, Routes, SituCaps};
use crate::format::BLOCK;
use crate::matmul::{Output, Packed, matmul};
use crate::vector;
use std::cell::Cell;

/// Added to the sum of the chosen scores before dividing, as the release does.
const ROUTE_EPS: f32 = 1e-20;

/// Most rows of an expert that a thread takes for itself.
pub const ROWS_OF_A_THREAD: usize = 64;

thread_local! {
    /// A calling thread's inner activations of an expert, arranged for its last matrix.
    static HIDDEN: Cell<Packed> = Cell::default();
}

impl Cpu {
    pub(super) fn route_rows(&self, logits: &Rows, bias: &[f32], top_k: usize, scale: f32) -> Routes {
        let mut routes = Routes {
            top_k,
            experts: vec![0; logits.rows * top_k],
            weights: vec![0.0; logits.rows * top_k],
        };
        let places = routes
            .experts
            .chunks_exact_mut(top_k.max(1))
            .zip(routes.weights.chunks_exact_mut(top_k.max(1)));
        self.each(places.enumerate().collect(), |(row, (experts, weights))| {
            let mut scores = logits.row(row).to_vec();
            // SAFETY: `new` checked the form.
            unsafe { vector::sigmoid_all(self.isa, &mut scores) };
            experts.copy_from_slice(&choose(&scores, bias, top_k));
            let score = |e: &u32| scores[*e as usize];
            let sum = experts.iter().map(score).fold(0.0, |sum, score| sum + score) + ROUTE_EPS;
            weights
                .iter_mut()
                .zip(&*experts)
                .for_each(|(w, e)| *w = score(e) / sum * scale);
        });
        routes
    }

    pub(super) fn expert_rows(&self, work: &[ExpertWork], caps: SituCaps, x: &Rows, results: &mut Rows) {
        let latent = results.width;
        assert_eq!(x.width, latent);
        let places = || work.iter().flat_map(|w| w.takers).map(|t| t.place);
        let rows = results.rows.max(places().map(|place| place + 1).max().unwrap_or(0));
        results.resize(rows);
        let mut sorted: Vec<usize> = places().collect();
        sorted.sort_unstable();
        assert!(sorted.is_sorted_by(|a, b| a < b), "a place is taken twice");
        let out = Output::new(results.data_mut(), rows, latent);
        // Threads take an expert each where rows are few, and share an expert where they are many: what an expert's rows take in
        // memory is then there once. What is left over when experts end is shared in both cases.
        let (few, many): (Vec<ExpertWork>, Vec<ExpertWork>) =
            work.iter().partition(|w| w.takers.len() <= ROWS_OF_A_THREAD);
        let parts = self.parts().div_ceil(few.len().max(1));
        self.each(few, |w| self.expert(parts, &w, caps, x, out));
        many.iter().for_each(|w| self.expert(self.parts(), w, caps, x, out));
    }

    /// One expert, each of its two products in some `parts`, into the places of its takers, which nobody else touches.
    fn expert(&self, parts: usize, w: &ExpertWork, caps: SituCaps, x: &Rows, out: Output) {
        let ExpertMatrices { gate, up, down } = &w.matrices;
        let (inner, latent, n) = (gate.rows(), down.rows(), w.takers.len());
        assert_eq!((x.width, down.cols()), (latent, inner));
        let places: Vec<usize> = w.takers.iter().map(|t| t.place).collect();
        let out = out.at(&places);
        with_packed(|packed| {
            self.pack(packed, n, latent, |i| x.row(w.takers[i].row));
            let mut hidden = HIDDEN.take();
            let slots = hidden.resize(n, inner);
            self.split(parts, &[[inner, 2 * latent]], |_, outputs| {
                // Both factors of a few inner numbers, then their product, straight to where the next matrix wants it.
                let (first, width) = (outputs.start, outputs.len());
                let mut both = vec![0.0; 2 * n * width];
                let (factor, linear) = both.split_at_mut(n * width);
                for (w, y) in [(gate, &mut *factor), (up, &mut *linear)] {
                    let part = w.slice(outputs.clone());
                    // SAFETY: `new` checked the form; the memory is this task's own.
                    unsafe { matmul(self.isa, &part, 0..width, packed, Output::new(y, n, width)) }
                }
                // SAFETY: `new` checked the form.
                unsafe { vector::situ(self.isa, factor, linear, caps.beta, caps.linear_beta) };
                for (i, row) in factor.chunks_exact(width).enumerate() {
                    // SAFETY: this task alone fills these columns, and ranges begin at a block.
                    unsafe { slots.fill(i, first / BLOCK, row) }
                }
            });
            self.split(parts, &[[latent, inner]], |_, outputs| {
                // SAFETY: `new` checked the form; the places are this expert's and the ranges of different tasks do not meet.
                unsafe { matmul(self.isa, down, outputs, &hidden, out) }
            });
            HIDDEN.set(hidden);
        });
    }
}

/// The `top_k` experts with the largest `score + bias`, ties to the lower id; ids ascending.
fn choose(scores: &[f32], bias: &[f32], top_k: usize) -> Vec<u32> {
    let mut order: Vec<(f32, u32)> = scores.iter().zip(bias).zip(0..).map(|((s, b), e)| (s + b, e)).collect();
    let better = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    if top_k < order.len() {
        order.select_nth_unstable_by(top_k, better);
        order.truncate(top_k);
    }
    let mut ids: Vec<u32> = order.into_iter().map(|(_, e)| e).collect();
    ids.sort_unstable();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, Demand, Taker};
    use crate::functions::sigmoid;
    use crate::{Elements, Isa, Matrix};

    #[test]
    fn ties_go_to_the_lower_id_and_bias_selects_but_does_not_weigh() {
        assert_eq!(choose(&[0.5, 0.5, 0.5, 0.5], &[0.0; 4], 2), [0, 1]);
        assert_eq!(choose(&[0.1, 0.5, 0.2, 0.5], &[0.0, 0.0, 0.4, 0.0], 2), [1, 2]);
        assert_eq!(choose(&[0.1, 0.9], &[0.0; 2], 2), [0, 1]);
        let cpu = Cpu::new(Isa::detect(), 1).unwrap();
        let mut logits = cpu.act(1, 3);
        logits.resize(1);
        logits.data_mut().copy_from_slice(&[0.0, 0.0, 5.0]);
        let r = cpu.route(&logits, &vec![0.0, 1.0, 0.0], 2, 2.0);
        assert_eq!(r.experts, [1, 2]);
        let (a, b) = (0.5, sigmoid(5.0));
        assert_eq!(r.weights, [a / (a + b) * 2.0, b / (a + b) * 2.0]);
        assert_eq!(r.demand().experts(), [1, 2]);
        assert_eq!(r.demand().takers(2), [Taker { row: 0, place: 1 }]);
    }

    #[test]
    fn demand_is_routes_by_expert() {
        let routes = Routes {
            top_k: 2,
            experts: vec![1, 5, 0, 5, 1, 2],
            weights: vec![0.5; 6],
        };
        let demand = routes.demand();
        assert_eq!(demand.experts(), [0, 1, 2, 5]);
        let places = |expert| {
            demand
                .takers(expert)
                .iter()
                .map(|t| (t.row, t.place))
                .collect::<Vec<_>>()
        };
        assert_eq!(places(0), [(1, 2)]);
        assert_eq!(places(1), [(0, 0), (2, 4)]);
        assert_eq!(places(2), [(2, 5)]);
        assert_eq!(places(5), [(0, 1), (1, 3)]);
        assert_eq!(places(3), []);
        assert_eq!(Routes::default().demand(), Demand::default());
    }

    /// One and many threads, one and many rows, give the same bits, and the result is the formula's.
    #[test]
    fn an_expert_is_the_formula() {
        let (latent, inner, rows) = (64, 96, 7);
        let mut s = 12345u32;
        let mut byte = || {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 24) as u8
        };
        let mut tensor = |n: usize| -> (Vec<u8>, Vec<u8>) {
            (
                (0..n / 2).map(|_| byte()).collect(),
                (0..n / 32).map(|_| 122 + byte() % 3).collect(),
            )
        };
        let (g, u, d) = (tensor(latent * inner), tensor(latent * inner), tensor(latent * inner));
        let m = |t: &'static str, r, c, w: &'_ (Vec<u8>, Vec<u8>)| -> (Vec<u8>, Vec<u8>, usize, usize) {
            let _ = t;
            (w.0.clone(), w.1.clone(), r, c)
        };
        let parts = [
            m("gate", inner, latent, &g),
            m("up", inner, latent, &u),
            m("down", latent, inner, &d),
        ];
        let mats: Vec<Matrix> = parts
            .iter()
            .map(|(p, s, r, c)| Matrix::new(*r, *c, Elements::Mxfp4 { packed: p, scale: s }).unwrap())
            .collect();
        let w = ExpertMatrices {
            gate: mats[0],
            up: mats[1],
            down: mats[2],
        };
        let caps = SituCaps {
            beta: 4.0,
            linear_beta: 25.0,
        };
        let mut want: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let cpu = Cpu::new(isa, threads).unwrap();
                let mut x = cpu.act(rows, latent);
                x.resize(rows);
                x.data_mut()
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, v)| *v = ((i * 37 % 101) as f32 - 50.0) / 60.0);
                let takers: Vec<Taker> = (0..rows).map(|row| Taker { row, place: row }).collect();
                let mut all = cpu.act(rows, latent);
                let work = |takers| ExpertWork { matrices: w, takers };
                cpu.experts(&[work(&takers)], caps, &x, &mut all);
                let mut single = cpu.act(rows, latent);
                let each: Vec<_> = takers.chunks(1).map(work).collect();
                cpu.experts(&each, caps, &x, &mut single);
                assert_eq!(all.data(), single.data());
                assert_eq!(want.get_or_insert_with(|| all.data().to_vec()), all.data());
                let row = x.row(3);
                let dot = |m: &Matrix, r: usize, x: &dyn Fn(usize) -> f64| -> f64 {
                    (0..m.cols()).map(|c| m.at(r, c) as f64 * x(c)).sum()
                };
                let h: Vec<f64> = (0..inner)
                    .map(|r| {
                        let (g, u) = (dot(&w.gate, r, &|c| row[c] as f64), dot(&w.up, r, &|c| row[c] as f64));
                        4.0 * (g / 4.0).tanh() / (1.0 + (-g).exp()) * 25.0 * (u / 25.0).tanh()
                    })
                    .collect();
                for r in 0..latent {
                    let exact = dot(&w.down, r, &|c| h[c]);
                    assert!((all.row(3)[r] as f64 - exact).abs() < 1e-5 * exact.abs().max(1.0));
                }
            }
        }
    }
}
