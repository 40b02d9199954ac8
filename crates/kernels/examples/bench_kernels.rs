//! Each kernel's share of its floor: the larger of bytes / read bandwidth and operations / multiply-add peak, both
//! measured in the same run, interleaved with the kernels.
//!
//! `cargo run --release -p kernels --example bench_kernels [-- OUT.json]` or `make bench-kernels`. A second argument keeps
//! only cases whose "name rows isa threads" contain it, or one of its parts if it has commas; `-` as the first writes no file.

mod floors;

use floors::{fma_peak, median, read_bandwidth, seconds};
use kernels::{
    Backend, Cpu, Elements, ExpertMatrices, ExpertWork, Isa, KvFormat, Lane, Matrix, MlaShape, SituCaps, Span, Taker,
    WeightFormat,
};
use std::io::Write;
use std::sync::Arc;

/// Weights of one measurement: beyond any cache of the machines that we know.
const WEIGHT_BYTES: usize = 1 << 30;
/// Repetitions; the median counts.
const REPEATS: usize = 5;
const ROWS: [usize; 5] = [1, 4, 16, 64, 512];

/// Bytes at a cache line's start, as a loader's buffers are.
struct Aligned(Vec<Lane>);

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the bytes of the lanes, all of which are set.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), size_of_val(&*self.0)) }
    }
}

impl Aligned {
    fn new(bytes: &[u8]) -> Self {
        let lane = |bytes: &[u8]| {
            Lane(std::array::from_fn(|l| {
                f32::from_le_bytes(bytes[4 * l..][..4].try_into().unwrap())
            }))
        };
        Self(bytes.chunks_exact(size_of::<Lane>()).map(lane).collect())
    }
}

struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut v = vec![0; n];
        v.chunks_mut(8)
            .for_each(|c| c.copy_from_slice(&self.next().to_le_bytes()[..c.len()]));
        v
    }
    /// bf16 numbers in [-1, 1).
    fn bf16(&mut self, n: usize) -> Vec<u8> {
        let mut v = self.bytes(2 * n);
        for b in v.chunks_exact_mut(2) {
            // Sign and mantissa stay random; the exponent becomes one of four below 1.
            b[1] = (b[1] & 0x80) | 0x3e | (b[1] & 1);
        }
        v
    }
}

/// Makes a case for a back end.
type Make = Box<dyn Fn(&mut Noise, &Cpu) -> Case>;

/// A kernel to measure. Its weights live only from `make` until it is measured.
struct Kind {
    name: &'static str,
    rows: usize,
    make: Make,
}

impl Kind {
    fn new(name: &'static str, rows: usize, make: impl Fn(&mut Noise, &Cpu) -> Case + 'static) -> Self {
        Self {
            name,
            rows,
            make: Box::new(make),
        }
    }
}

/// One measured kernel.
struct Case {
    bytes: f64,
    flops: f64,
    run: Box<dyn FnMut(&Cpu)>,
}

fn linear_case(rows: usize, out: usize, cols: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let count = (WEIGHT_BYTES / (out * cols * 2)).max(1);
    let count = if rows >= 64 { 1 } else { count };
    let weights: Vec<_> = (0..count)
        .map(|_| {
            cpu.linear(
                out,
                cols,
                WeightFormat::Bf16,
                Arc::new(Aligned::new(&noise.bf16(out * cols))),
            )
            .unwrap()
        })
        .collect();
    let mut x = cpu.act(rows, cols);
    cpu.upload_bf16(&noise.bf16(rows * cols), &mut x);
    let mut y = cpu.act(rows, out);
    Case {
        bytes: (count * out * cols * 2) as f64,
        flops: (2 * rows * count * out * cols) as f64,
        run: Box::new(move |cpu| weights.iter().for_each(|w| cpu.matmul(w, &x, &mut y))),
    }
}

fn expert_case(rows: usize, latent: usize, inner: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    let weights = 3 * latent * inner;
    let count = WEIGHT_BYTES / (weights * 17 / 32);
    let count = if rows >= 64 {
        (count * 8 / rows).clamp(1, 2)
    } else {
        count
    };
    let packed: Vec<Aligned> = (0..count).map(|_| Aligned::new(&noise.bytes(weights / 2))).collect();
    let scale: Vec<u8> = noise.bytes(latent * inner / 32).iter().map(|b| 118 + b % 4).collect();
    let mut x = cpu.act(rows, latent);
    cpu.upload_bf16(&noise.bf16(rows * latent), &mut x);
    let mut results = cpu.act(rows, latent);
    let takers: Vec<Taker> = (0..rows).map(|row| Taker { row, place: row }).collect();
    Case {
        bytes: (count * (weights / 2 + weights / 32)) as f64,
        flops: (2 * rows * count * weights) as f64,
        run: Box::new(move |cpu| {
            for packed in &packed {
                let third = weights / 6;
                let m = |i: usize, rows, cols| {
                    let packed = &packed.as_ref()[i * third..(i + 1) * third];
                    Matrix::new(rows, cols, Elements::Mxfp4 { packed, scale: &scale }).unwrap()
                };
                let work = ExpertWork {
                    matrices: ExpertMatrices {
                        gate: m(0, inner, latent),
                        up: m(1, inner, latent),
                        down: m(2, latent, inner),
                    },
                    takers: &takers,
                };
                let caps = SituCaps {
                    beta: 4.0,
                    linear_beta: 25.0,
                };
                cpu.experts(&[work], caps, &x, &mut results);
            }
        }),
    }
}

fn kda_case(rows: usize, layers: usize, noise: &mut Noise, cpu: &Cpu) -> Case {
    const HEADS: usize = 96;
    const DIM: usize = 128;
    let mut states: Vec<_> = (0..layers).map(|_| cpu.kda(HEADS, DIM, 4)).collect();
    let width = HEADS * DIM;
    let mut input = |width| {
        let mut a = cpu.act(rows, width);
        cpu.upload_bf16(&noise.bf16(rows * width), &mut a);
        a
    };
    let (q, k, v, mut alpha, mut beta) = (input(width), input(width), input(width), input(width), input(HEADS));
    cpu.sigmoid(&mut alpha);
    cpu.sigmoid(&mut beta);
    let mut y = cpu.act(rows, width);
    let size = (layers * HEADS * DIM * DIM) as f64;
    Case {
        // Read once and written once.
        bytes: 8.0 * size,
        flops: 7.0 * size * rows as f64,
        run: Box::new(move |cpu| {
            let spans = [Span { first: 0, rows }];
            states
                .iter_mut()
                .for_each(|s| cpu.delta(&q, &k, &v, &alpha, &beta, &spans, &mut [s], &mut y));
        }),
    }
}

fn attention_case(rows: usize, positions: usize, format: KvFormat, noise: &mut Noise, cpu: &Cpu) -> Case {
    let shape = MlaShape {
        heads: 96,
        nope: 128,
        shared: 64,
        value: 128,
        latent: 512,
    };
    let width = shape.latent + shape.shared;
    let mut cache = cpu.latents(width, format);
    let norm = cpu.vector(vec![1.0; shape.latent]);
    let mut kv = cpu.act(64, width);
    for _ in 0..positions / 64 {
        cpu.upload_bf16(&noise.bf16(64 * width), &mut kv);
        cpu.append_latents(&kv, &norm, 1e-6, &[Span { first: 0, rows: 64 }], &mut [&mut cache]);
    }
    let mut q = cpu.act(rows, shape.heads * width);
    cpu.upload_bf16(&noise.bf16(rows * shape.heads * width), &mut q);
    let mut y = cpu.act(rows, shape.heads * shape.latent);
    Case {
        bytes: (positions * width * format.bytes()) as f64,
        flops: (2 * rows * shape.heads * positions * (width + shape.latent)) as f64,
        run: Box::new(move |cpu| cpu.attend(&q, shape, 0.01, &[Span { first: 0, rows }], &[&cache], &mut y)),
    }
}

fn kinds() -> Vec<Kind> {
    let mut kinds = vec![];
    for rows in ROWS {
        kinds.push(Kind::new("bf16 product", rows, move |n, cpu| {
            linear_case(rows, 12288, 7168, n, cpu)
        }));
        kinds.push(Kind::new("mxfp4 expert", rows, move |n, cpu| {
            expert_case(rows, 3584, 3072, n, cpu)
        }));
    }
    kinds.push(Kind::new("kda step", 1, |n, cpu| kda_case(1, 69, n, cpu)));
    kinds.push(Kind::new("kda step", 64, |n, cpu| kda_case(64, 4, n, cpu)));
    for rows in [1, 64] {
        for (name, format) in [
            ("mla attention", KvFormat::F32),
            ("mla attention, bf16 latents", KvFormat::Bf16),
        ] {
            kinds.push(Kind::new(name, rows, move |n, cpu| {
                attention_case(rows, 8192, format, n, cpu)
            }));
        }
    }
    kinds
}

fn main() {
    let out = std::env::args().nth(1).filter(|name| name != "-");
    let only = std::env::args().nth(2).unwrap_or_default();
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let mut noise = Noise(0x1234_5678_9abc_def1);
    let probe = noise.bytes(WEIGHT_BYTES);
    let mut lines = vec![];
    let kinds = kinds();
    for isa in Isa::available().into_iter().skip(1).rev() {
        for threads in if all > 1 { vec![1, all] } else { vec![1] } {
            let cpu = Cpu::new(isa, threads).unwrap();
            for kind in &kinds {
                let title = format!("{} {} {isa} {threads}", kind.name, kind.rows);
                if !only.split(',').any(|part| title.contains(part)) {
                    continue;
                }
                let mut case = (kind.make)(&mut noise, &cpu);
                (case.run)(&cpu);
                let (mut times, mut bandwidths, mut peaks) = (vec![], vec![], vec![]);
                for _ in 0..REPEATS {
                    bandwidths.push(read_bandwidth(&probe, threads));
                    peaks.push(fma_peak(isa, threads));
                    times.push(seconds(|| (case.run)(&cpu)));
                }
                let (t, bandwidth, peak) = (median(times), median(bandwidths), median(peaks));
                let floor = (case.bytes / bandwidth).max(case.flops / peak);
                let line = format!(
                    "{{\"kernel\":\"{}\",\"isa\":\"{isa}\",\"threads\":{threads},\"rows\":{},\"gb_per_s\":{:.2},\"gflop_per_s\":{:.1},\"share_of_floor\":{:.3},\"read_gb_per_s\":{:.1},\"fma_gflop_per_s\":{:.1}}}",
                    kind.name,
                    kind.rows,
                    case.bytes / t / 1e9,
                    case.flops / t / 1e9,
                    floor / t,
                    bandwidth / 1e9,
                    peak / 1e9
                );
                println!("{line}");
                lines.push(line);
            }
        }
    }
    if let Some(out) = out {
        let mut f = std::fs::File::create(&out).unwrap();
        writeln!(f, "[\n{}\n]", lines.join(",\n")).unwrap();
    }
}
