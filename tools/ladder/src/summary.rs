//! Lines, medians and targets.

use serde_json::{Value, json};

use crate::run::Run;
use crate::rungs::Rung;

/// Points by which a drive's share of the bytes may differ from its share of the sum, where every drive holds everything.
const SHARE_POINTS: f64 = 0.03;

/// One run, for the eye.
pub fn line(run: &Run) -> String {
    let share: Vec<String> = run.share.iter().map(|share| format!("{:.1}", share * 100.0)).collect();
    format!(
        "{:<11} round {}: {:.1} % of {:.1} MB/s, {:.3} tokens/s, bound {:.2} s, barriers {:.2} s, time {:.2} s, shares {}, latest {:.1} ms, slowest fetch {:.1} ms, load {:.1}",
        run.rung,
        run.round + 1,
        run.fraction * 100.0,
        run.sum_ceiling / 1e6,
        run.tok_per_s,
        run.bound_s,
        run.barrier_s,
        run.time_s,
        share.join("/"),
        run.latest_ms,
        run.slowest_fetch_ms,
        run.load
    )
}

/// The runs of a rung.
fn of<'a>(rung: &'a Rung, runs: &'a [Run]) -> impl Iterator<Item = &'a Run> {
    runs.iter().filter(|run| run.rung == rung.name)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Median fraction, and the largest difference of a median share from its share of the sum.
fn middle(rung: &Rung, runs: &[Run]) -> (f64, f64) {
    let drives = of(rung, runs).next().map_or(0, |run| run.drives);
    let off = |drive: usize| median(of(rung, runs).map(|run| run.share[drive] - run.share_of_sum[drive])).abs();
    (
        median(of(rung, runs).map(|run| run.fraction)),
        (0..drives).map(off).fold(0.0, f64::max),
    )
}

/// Medians of all rungs.
pub fn medians(rungs: &[Rung], runs: &[Run]) -> Value {
    let of_rung = |rung: &Rung| {
        let (fraction, off) = middle(rung, runs);
        json!({
            "rung": rung.name,
            "fraction": fraction,
            "target": rung.target,
            "share_off_by": off,
            "tok_per_s": median(of(rung, runs).map(|run| run.tok_per_s)),
        })
    };
    rungs.iter().map(of_rung).collect()
}

/// Medians against their targets.
pub fn table(rungs: &[Rung], runs: &[Run]) -> String {
    let mut text = String::from("rung         median   least   target   shares off by\n");
    for rung in rungs {
        let (fraction, off) = middle(rung, runs);
        let least = of(rung, runs).map(|run| run.fraction).fold(f64::INFINITY, f64::min);
        let even = rung.layout != "mirrors" || off <= SHARE_POINTS;
        let verdict = match (fraction >= rung.target, even) {
            (true, true) => "",
            (false, _) => "   below the target",
            (true, false) => "   shares differ too much",
        };
        text += &format!(
            "{:<11} {:>5.1} %  {:>4.1} %   {:>4.1} %   {:.1} points{verdict}\n",
            rung.name,
            fraction * 100.0,
            least * 100.0,
            rung.target * 100.0,
            off * 100.0
        );
    }
    text
}
