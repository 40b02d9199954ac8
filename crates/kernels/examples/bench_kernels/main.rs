//! Each kernel's share of its floor: the larger of bytes / read bandwidth and operations / multiply-add peak, both measured in the
//! same run, in turn with the kernels.
//!
//! `cargo run --release -p kernels --example bench_kernels [-- OUT.json]` or `make bench-kernels`: some minutes. A second
//! argument keeps only kernels whose "name rows" contain it, or one of its parts if it has semicolons; `-` as the first writes no file.
//!
//! Kernels count with their median, floors with their best reading of the whole run (`floors`), so a share is too low rather
//! than too high where other programs take part of the machine. Weights come from memory, not from a cache; MXFP4 experts are
//! the published bytes as they land. Kernels without weights take their activations from memory too, which in a pass they find in a cache:
//! their shares say that they keep up with memory, and what a fork and join costs few rows.
//!
//! At the end: what a fork and join of the threads costs, and what they cost while idle. That computing leaves a reader its
//! processor time is measured with readers: `make ladder` and `make passes`.

mod cases;
#[path = "../floors/mod.rs"]
mod floors;
mod pool;
#[path = "../../tests/processor_time/mod.rs"]
mod processor_time;

use cases::{Kind, Noise, kinds};
use floors::{Floors, median, seconds};
use kernels::{Cpu, Isa};

/// Repetitions; the median counts. Fewer where one takes long.
const REPEATS: usize = 5;
const FEW: usize = 3;
const LONG_SECONDS: f64 = 1.0;

/// A measured kernel.
struct Line {
    name: &'static str,
    rows: usize,
    isa: Isa,
    threads: usize,
    bytes: f64,
    flops: f64,
    seconds: f64,
}

impl Line {
    fn json(&self, floors: &Floors) -> String {
        let (bandwidth, peak) = (floors.bandwidth(self.threads), floors.peak(self.isa, self.threads));
        let floor = (self.bytes / bandwidth).max(self.flops / peak);
        format!(
            "{{\"kernel\":\"{}\",\"isa\":\"{}\",\"threads\":{},\"rows\":{},\"gb_per_s\":{:.2},\"gflop_per_s\":{:.1},\"share_of_floor\":{:.3},\
             \"read_gb_per_s\":{:.1},\"fma_gflop_per_s\":{:.1}}}",
            self.name,
            self.isa,
            self.threads,
            self.rows,
            self.bytes / self.seconds / 1e9,
            self.flops / self.seconds / 1e9,
            floor / self.seconds,
            bandwidth / 1e9,
            peak / 1e9
        )
    }
}

/// Measures a kernel on all back ends, which take turns.
fn measure(kind: &Kind, backends: &[Cpu], noise: &mut Noise, floors: &mut Floors) -> Vec<Line> {
    let mut case = (kind.make)(kind.rows, noise, &backends[0]);
    let longest = backends
        .iter()
        .map(|cpu| seconds(|| (case.run)(cpu)))
        .fold(0.0, f64::max);
    let repeats = if longest > LONG_SECONDS { FEW } else { REPEATS };
    let mut times = vec![vec![]; backends.len()];
    for _ in 0..repeats {
        for (cpu, times) in backends.iter().zip(&mut times) {
            floors.read(cpu.threads());
            floors.multiply(cpu.isa(), cpu.threads());
            times.push(seconds(|| (case.run)(cpu)));
        }
    }
    let line = |(cpu, times): (&Cpu, Vec<f64>)| Line {
        name: kind.name,
        rows: kind.rows,
        isa: cpu.isa(),
        threads: cpu.threads(),
        bytes: case.bytes,
        flops: case.flops,
        seconds: median(times),
    };
    backends.iter().zip(times).map(line).collect()
}

fn main() {
    let out = std::env::args().nth(1).filter(|name| name != "-");
    let only = std::env::args().nth(2).unwrap_or_default();
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if all > 1 { vec![1, all] } else { vec![1] };
    let isas = || Isa::available().into_iter().skip(1).rev();
    let backends: Vec<Cpu> = isas()
        .flat_map(|isa| threads.iter().map(move |&threads| Cpu::new(isa, threads).unwrap()))
        .collect();
    let (mut noise, mut floors) = (Noise(0x1234_5678_9abc_def1), Floors::new());
    let mut measured = vec![];
    for kind in kinds() {
        let title = format!("{} {}", kind.name, kind.rows);
        if only.split(';').any(|part| title.contains(part)) {
            let start = std::time::Instant::now();
            measured.extend(measure(&kind, &backends, &mut noise, &mut floors));
            eprintln!("{title} rows: {:.1} s", start.elapsed().as_secs_f64());
        }
    }
    drop(backends);
    let mut lines: Vec<String> = measured.iter().map(|line| line.json(&floors)).collect();
    lines.extend(
        threads
            .iter()
            .filter(|&&threads| threads > 1)
            .map(|&threads| pool::measure(threads)),
    );
    let text = lines.join(",\n");
    println!("{text}");
    if let Some(out) = out {
        std::fs::write(&out, format!("[\n{text}\n]\n")).unwrap_or_else(|e| panic!("{out}: {e}"));
    }
}
