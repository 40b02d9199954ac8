//! The rules, and the world in which they are compared. Used by the example and by a test.
#![allow(missing_docs, dead_code, reason = "an example's parts; the test uses some")]

use std::sync::Arc;

use drives::{
    Arena, Clock, DriveId, DriveTuning, ExpertId, FileId, Home, Layout, LayoutBuilder, SimBackend, SimDrive, SimRandom,
    SimServer, StreamOptions, Streamer, VirtualClock,
};

pub const LAYERS: usize = 12;
pub const TOKENS: usize = 25;
const EXPERTS: usize = 896;
const TOP_K: usize = 16;
const EXPERT_BYTES: u64 = 17_547_264;
/// Part of a token's experts that the next one keeps.
const CARRIED: f64 = 0.35;
const RATES: [u64; 4] = [13_600_000_000, 7_100_000_000, 7_100_000_000, 5_700_000_000];
const DEPTH: usize = 4;
/// Time to reach data, hidden behind the read before.
const LATENCY_NS: u64 = 60_000;

/// Share of the experts, by use, that each drive holds.
pub const LAYOUTS: [(&str, [f64; 4]); 3] = [
    ("mirrors", [1.0; 4]),
    ("100/85/61/32 %", [1.0, 0.85, 0.61, 0.32]),
    ("85/100/61/32 %", [0.85, 1.0, 0.61, 0.32]),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Drives pull: this crate.
    Pull,
    /// The expert's number says which of its homes reads all of it.
    Hash,
    /// The first home in a fixed order that has it, the slowest drives first.
    FixedOrder,
    /// An equal part from each of its homes.
    Striped,
    /// The home where it is expected to be done first, decided when the layer's experts are known; whole experts.
    PushWhole,
    /// The same, in pieces of 2 MiB.
    PushPieces,
}

pub const RULES: [Rule; 6] = [
    Rule::Pull,
    Rule::Hash,
    Rule::FixedOrder,
    Rule::Striped,
    Rule::PushWhole,
    Rule::PushPieces,
];

impl Rule {
    pub fn name(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Hash => "hash",
            Self::FixedOrder => "fixed order",
            Self::Striped => "striped",
            Self::PushWhole => "push, whole",
            Self::PushPieces => "push, 2 MiB",
        }
    }
}

/// Who holds what, and what is asked for.
pub struct World {
    /// Drives that hold an expert of a layer.
    homes: Vec<Vec<Vec<usize>>>,
    /// Experts of each layer of each token.
    routes: Vec<Vec<Vec<usize>>>,
    layout: Arc<Layout>,
}

pub fn world(shares: &[f64; 4]) -> World {
    let mut random = SimRandom::new(1);
    let weights: Vec<Vec<f64>> = (0..LAYERS).map(|_| popularity(&mut random)).collect();
    let homes: Vec<Vec<Vec<usize>>> = weights.iter().map(|weights| homes(weights, shares)).collect();
    let routes = routes(&weights, &mut random);
    let layout = Arc::new(layout(&homes));
    World { homes, routes, layout }
}

/// How often experts are used: Zipf-like, in no order.
fn popularity(random: &mut SimRandom) -> Vec<f64> {
    let mut weights: Vec<f64> = (0..EXPERTS).map(|rank| 1.0 / (rank as f64 + 10.0).powf(0.55)).collect();
    for last in (1..EXPERTS).rev() {
        weights.swap(last, random.below(last as u64 + 1) as usize);
    }
    weights
}

fn homes(weights: &[f64], shares: &[f64; 4]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..EXPERTS).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let mut homes = vec![Vec::new(); EXPERTS];
    for (rank, expert) in order.into_iter().enumerate() {
        let held = |share: f64| (rank as f64) < share * EXPERTS as f64;
        homes[expert] = (0..RATES.len()).filter(|&drive| held(shares[drive])).collect();
    }
    homes
}

fn routes(weights: &[Vec<f64>], random: &mut SimRandom) -> Vec<Vec<Vec<usize>>> {
    let mut before = vec![Vec::new(); LAYERS];
    let token = |_| {
        for (layer, weights) in weights.iter().enumerate() {
            let mut chosen: Vec<usize> = before[layer]
                .iter()
                .copied()
                .filter(|_| random.chance(CARRIED))
                .collect();
            let total: f64 = weights.iter().sum();
            while chosen.len() < TOP_K {
                let mut left = random.fraction() * total;
                let drawn = weights.iter().position(|weight| {
                    left -= weight;
                    left < 0.0
                });
                if let Some(expert) = drawn.filter(|expert| !chosen.contains(expert)) {
                    chosen.push(expert);
                }
            }
            chosen.sort_unstable();
            before[layer] = chosen;
        }
        before.clone()
    };
    (0..TOKENS).map(token).collect()
}

fn id(layer: usize, expert: usize) -> ExpertId {
    ExpertId {
        layer: layer as u32,
        expert: expert as u32,
    }
}

fn layout(homes: &[Vec<Vec<usize>>]) -> Layout {
    let mut builder = LayoutBuilder::new();
    let whole = (LAYERS * EXPERTS) as u64 * EXPERT_BYTES;
    let files: Vec<FileId> = (0..RATES.len())
        .map(|drive| {
            let drive = builder.virtual_drive(&format!("drive-{drive}"));
            builder.virtual_file(drive, "experts", whole)
        })
        .collect();
    for (layer, homes) in homes.iter().enumerate() {
        for (expert, homes) in homes.iter().enumerate() {
            let offset = (layer * EXPERTS + expert) as u64 * EXPERT_BYTES;
            let extent = drives::Extent {
                page_offset: (offset % 4096) as u16,
                len: EXPERT_BYTES,
            };
            builder.shape(id(layer, expert), &[extent]).unwrap();
            for &drive in homes {
                let home = Home {
                    file: files[drive],
                    offset,
                    start: 0,
                    len: EXPERT_BYTES,
                };
                builder.home(id(layer, expert), 0, home).unwrap();
            }
        }
    }
    builder.build().unwrap()
}

fn drive(rate: u64) -> SimDrive {
    SimDrive {
        rate,
        depth: DEPTH,
        latency_ns: LATENCY_NS,
        ..SimDrive::default()
    }
}

/// The drives' rates in the next layer.
fn rates(jitter: f64, random: &mut SimRandom) -> [u64; 4] {
    RATES.map(|rate| (rate as f64 * (1.0 + jitter * (2.0 * random.fraction() - 1.0))) as u64)
}

/// The bytes of all barriers in the time that a rule takes, as part of the drives' nominal rates added up.
pub fn fraction(world: &World, rule: Rule, jitter: f64) -> f64 {
    let ns = match rule {
        Rule::Pull => pulled(world, jitter).0,
        _ => pushed_ns(world, rule, jitter),
    };
    let bytes = (TOKENS * LAYERS * TOP_K) as u64 * EXPERT_BYTES;
    let sum: u64 = RATES.iter().sum();
    bytes as f64 / (sum as f64 * ns as f64 / 1e9)
}

/// What pulling reaches of the bound that the layout and the routes set, at the rates that were last measured.
pub fn fraction_of_bound(world: &World, jitter: f64) -> f64 {
    let (ns, bound_ns) = pulled(world, jitter);
    bound_ns as f64 / ns as f64
}

/// Nanoseconds that all barriers took, and the sum of their bounds.
fn pulled(world: &World, jitter: f64) -> (u64, u64) {
    let clock = Arc::new(VirtualClock::default());
    let backend = SimBackend::new(world.layout.clone(), &RATES.map(drive), None, clock.clone(), 0);
    let control = backend.control();
    let tuning = |rate| DriveTuning {
        rate: Some(rate),
        ..DriveTuning::default()
    };
    let options = StreamOptions {
        tuning: RATES.map(tuning).to_vec(),
        ..StreamOptions::default()
    };
    let arena = Arena::new(TOP_K * world.layout.slot_bytes(), world.layout.slot_bytes()).unwrap();
    let mut streamer =
        Streamer::single_threaded(world.layout.clone(), arena, Box::new(backend), clock.clone(), &options).unwrap();
    let ids: Vec<DriveId> = world.layout.drive_ids().collect();
    let mut random = SimRandom::new(5);
    for token in &world.routes {
        for (layer, experts) in token.iter().enumerate() {
            for (&id, rate) in ids.iter().zip(rates(jitter, &mut random)) {
                control.set_rate(id, rate);
            }
            let experts: Vec<ExpertId> = experts.iter().map(|&expert| id(layer, expert)).collect();
            let barrier = streamer.demand(&experts).unwrap();
            while streamer.next(&barrier).unwrap().is_some() {}
        }
    }
    let reports = streamer.barriers(0).barriers;
    (clock.now_ns(), reports.iter().map(|report| report.bound_ns).sum())
}

fn pushed_ns(world: &World, rule: Rule, jitter: f64) -> u64 {
    let mut random = SimRandom::new(5);
    let mut servers = RATES.map(|rate| SimServer::new(drive(rate), 0));
    let mut now = 0;
    for token in &world.routes {
        for (layer, experts) in token.iter().enumerate() {
            for (server, rate) in servers.iter_mut().zip(rates(jitter, &mut random)) {
                server.set_rate(rate);
            }
            let mut reads = [const { Vec::new() }; 4];
            for &expert in experts {
                place(rule, expert, &world.homes[layer][expert], &mut reads);
            }
            let ends = servers
                .iter_mut()
                .zip(&reads)
                .map(|(server, reads)| run(server, reads, now));
            now = ends.fold(now, u64::max);
        }
    }
    now
}

/// Decides which drives read an expert, given what they have been told to read before.
fn place(rule: Rule, expert: usize, homes: &[usize], reads: &mut [Vec<u64>; 4]) {
    match rule {
        Rule::Pull => {}
        Rule::Hash => {
            let mixed = (expert as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
            reads[homes[mixed as usize % homes.len()]].push(EXPERT_BYTES);
        }
        Rule::FixedOrder => reads[homes[homes.len() - 1]].push(EXPERT_BYTES),
        Rule::Striped => {
            for &home in homes {
                reads[home].push(EXPERT_BYTES / homes.len() as u64);
            }
        }
        Rule::PushWhole | Rule::PushPieces => {
            let most = if rule == Rule::PushWhole { EXPERT_BYTES } else { 2 << 20 };
            let mut left = EXPERT_BYTES;
            while left > 0 {
                let bytes = left.min(most);
                left -= bytes;
                let done = |&drive: &usize| (reads[drive].iter().sum::<u64>() + bytes) as f64 / RATES[drive] as f64;
                let best = homes.iter().copied().min_by(|a, b| done(a).total_cmp(&done(b)));
                if let Some(best) = best {
                    reads[best].push(bytes);
                }
            }
        }
    }
}

/// When a drive that is kept at its depth has read all, from `now`.
fn run(server: &mut SimServer, reads: &[u64], now: u64) -> u64 {
    let mut landings = Vec::with_capacity(reads.len());
    for (nth, &bytes) in reads.iter().enumerate() {
        let issued = if nth < DEPTH { now } else { landings[nth - DEPTH] };
        landings.push(server.serve(issued, bytes));
    }
    landings.last().copied().unwrap_or(now)
}
