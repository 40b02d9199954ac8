//! What is measured.

use std::path::PathBuf;

use crate::model::Model;

/// Bandwidths of the drives in bytes a second: 13.6, 7.1, 7.1 and 5.7 GB/s at 1:40.
pub const RATES: [f64; 4] = [340e6, 177.5e6, 177.5e6, 142.5e6];

/// Shares of the experts that each drive holds in the usage-weighted layout.
pub const WEIGHTED: [f64; 4] = [1.0, 0.85, 0.61, 0.32];

/// One set-up.
pub struct Rung {
    pub name: String,
    /// mirrors, weighted or split.
    pub layout: &'static str,
    /// What each drive serves.
    pub served: Vec<PathBuf>,
    /// Whether the fastest drive falls to half its speed in mid-run.
    pub slowed: bool,
    /// Least median of the fraction of the sum.
    pub target: f64,
}

/// All set-ups.
pub fn all(model: &Model) -> Vec<Rung> {
    let mirrors = |drives: usize| vec![model.image.clone(); drives];
    let rung = |name: String, layout, served, slowed, target| Rung {
        name,
        layout,
        served,
        slowed,
        target,
    };
    let mut rungs: Vec<Rung> = (1..=RATES.len())
        .map(|drives| rung(format!("mirrors {drives}"), "mirrors", mirrors(drives), false, 0.95))
        .collect();
    let weighted = [std::slice::from_ref(&model.image), &model.weighted].concat();
    rungs.push(rung("weighted 4".into(), "weighted", weighted, false, 0.93));
    rungs.push(rung("split 4".into(), "split", model.split.clone(), false, 0.90));
    rungs.push(rung("slowed 4".into(), "mirrors", mirrors(RATES.len()), true, 0.93));
    rungs
}
