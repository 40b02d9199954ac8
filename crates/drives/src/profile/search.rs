//! Which probes to run, and what follows from them. Pure: the rig runs the probes and tells the time.

use std::time::Duration;

use super::{CHUNK_SIZES, DEPTHS, DriveSpeed, MOST_IN_FLIGHT};

/// Gains below this part of the best rate count as noise: smaller chunks and depths are preferred within it.
const FLAT: f64 = 0.03;

/// Drives that together give less than this part of what they give alone share a bottleneck.
const SHARED_BELOW: f64 = 0.85;

/// Shortest time of a probe. A few reads of a fast drive.
const MIN_PROBE: Duration = Duration::from_millis(6);

/// Shortest time of a probe of several drives. Longer, since one late thread spoils it for all.
const MIN_WIDE_PROBE: Duration = Duration::from_millis(25);

/// A probe lasts as long as the drive takes to deliver this many times what is in flight: the first fill is not counted.
const FILLS: f64 = 3.0;

/// Probes of one setting, of which the median counts. Odd.
const REPEATS: usize = 3;

/// A read should take at least this long, so that deciding and booking it, some microseconds, is little beside it.
const MIN_READ: Duration = Duration::from_micros(100);

/// Depth at which chunks are compared.
const BASE_DEPTH: usize = 4;

/// Depth of a drive that is too slow to compare any: two keep it busy while the next read is decided.
const UNSETTLED_DEPTH: usize = 2;

/// Parts of the budget: for the search on each drive, for a second look at each, and for all together. The rest is for pairs.
const ALONE_PART: f64 = 0.5;
const AGAIN_PART: f64 = 0.15;
const TOGETHER_PART: f64 = 0.2;

/// What one drive does during a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) drive: usize,
    pub(super) chunk: usize,
    pub(super) depth: usize,
}

/// Runs probes.
pub(super) trait Rig {
    /// Number of drives.
    fn drives(&self) -> usize;

    /// Keeps the loads' reads in flight for about `time`, at least until one read of each has ended. Bytes per second of each load,
    /// in their order; `None` where it could not be read so.
    fn run(&mut self, loads: &[Load], time: Duration) -> Vec<Option<f64>>;

    /// Time since the start.
    fn elapsed(&self) -> Duration;

    /// Whether two drives are parts of one disk.
    fn same_disk(&self, a: usize, b: usize) -> bool;
}

/// What the search found.
#[derive(Debug, PartialEq)]
pub(super) struct Found {
    pub(super) speeds: Vec<Option<DriveSpeed>>,
    /// Drives that share a bottleneck, ascending.
    pub(super) groups: Vec<Vec<usize>>,
}

/// Measures each drive alone, then all together, then pairs where together is less. It ends near `budget`.
pub(super) fn search(rig: &mut impl Rig, budget: Duration) -> Found {
    let drives = rig.drives();
    let part = |from: f64, part: f64, drive: usize| budget.mul_f64(from + part * (drive + 1) as f64 / drives as f64);
    let first = |drive| alone(rig, drive, part(0.0, ALONE_PART, drive));
    let firsts: Vec<Option<Alone>> = (0..drives).map(first).collect();
    // A ceiling is the most that a drive gives: a second look at another time corrects a first one that was disturbed.
    let mut speeds: Vec<Option<DriveSpeed>> = Vec::with_capacity(drives);
    for (drive, first) in firsts.into_iter().enumerate() {
        let until = part(ALONE_PART, AGAIN_PART, drive);
        speeds.push(first.map(|first| look_again(rig, drive, first, until)));
    }
    let until = budget.mul_f64(ALONE_PART + AGAIN_PART + TOGETHER_PART);
    let everyone: Vec<usize> = (0..drives).filter(|&drive| speeds[drive].is_some()).collect();
    if everyone.len() > 1 {
        speeds.iter_mut().flatten().for_each(|speed| speed.together = 0);
        book_together(rig, &mut speeds, &everyone, until);
        // Noise only ever takes away: what looks slowed is looked at twice.
        if !slowed(&speeds).is_empty() && until.saturating_sub(rig.elapsed()) > MIN_WIDE_PROBE {
            book_together(rig, &mut speeds, &everyone, until);
        }
    }
    // A drive that failed just now has only been seen alone.
    for speed in speeds.iter_mut().flatten().filter(|speed| speed.together == 0) {
        speed.together = speed.alone;
    }
    let groups = groups(rig, &speeds, budget);
    Found { speeds, groups }
}

/// What the search on one drive found.
struct Alone {
    speed: DriveSpeed,
    /// Whether a chunk size was found before the time was over.
    settled: bool,
}

/// The drive's ceiling and its best setting, by climbing from small chunks to large ones and then comparing depths.
fn alone(rig: &mut impl Rig, drive: usize, until: Duration) -> Option<Alone> {
    let load = |chunk, depth| Load { drive, chunk, depth };
    // One read tells how long further probes take.
    let pilot = rig.run(&[load(CHUNK_SIZES[0], 1)], Duration::ZERO).remove(0)?;
    let mut best = load(CHUNK_SIZES[0], UNSETTLED_DEPTH);
    let (mut ceiling, mut reached) = (pilot, 0.0);
    for chunk in CHUNK_SIZES {
        let Some(rate) = median(rig, load(chunk, BASE_DEPTH), ceiling, until) else {
            break;
        };
        let gain = rate > reached * (1.0 + FLAT);
        let hasty = (best.chunk as f64) < rate * MIN_READ.as_secs_f64();
        ceiling = ceiling.max(rate);
        if !(gain || hasty) {
            break;
        }
        (best, reached) = (load(chunk, BASE_DEPTH), rate);
    }
    let settled = reached > 0.0;
    if settled {
        best.depth = best_depth(rig, best, reached, &mut ceiling, until);
    }
    Some(Alone {
        speed: DriveSpeed {
            alone: ceiling as u64,
            together: ceiling as u64,
            chunk_bytes: best.chunk,
            depth: best.depth,
        },
        settled,
    })
}

/// The smallest depth that reaches what the base depth `reached`, or a larger one that gains.
fn best_depth(rig: &mut impl Rig, base: Load, reached: f64, ceiling: &mut f64, until: Duration) -> usize {
    let mut best = base.depth;
    for &depth in DEPTHS.iter().rev().filter(|&&depth| depth < base.depth) {
        match median(rig, Load { depth, ..base }, *ceiling, until) {
            Some(rate) if rate >= reached * (1.0 - FLAT) => best = depth,
            _ => break,
        }
    }
    if best < base.depth {
        return best;
    }
    let mut reached = reached;
    for &depth in DEPTHS.iter().filter(|&&depth| depth > base.depth) {
        match median(rig, Load { depth, ..base }, *ceiling, until) {
            Some(rate) if rate > reached * (1.0 + FLAT) => (best, reached) = (depth, rate),
            _ => break,
        }
    }
    *ceiling = ceiling.max(reached);
    best
}

/// Searches again on a drive that the time was too short for, and looks at the ceiling of another once more.
fn look_again(rig: &mut impl Rig, drive: usize, first: Alone, until: Duration) -> DriveSpeed {
    let mut speed = first.speed;
    if !first.settled {
        if let Some(Alone { speed: second, settled }) = alone(rig, drive, until) {
            let most = second.alone.max(speed.alone);
            if settled {
                speed = second;
            }
            (speed.alone, speed.together) = (most, most);
        }
        return speed;
    }
    let load = Load {
        drive,
        chunk: speed.chunk_bytes,
        depth: speed.depth,
    };
    let again = median(rig, load, speed.alone as f64, until).map_or(0, |again| again as u64);
    let most = again.max(speed.alone);
    (speed.alone, speed.together) = (most, most);
    speed
}

/// The middle rate of several probes; of one, when the time does not allow more. `None` when it allows none.
fn median(rig: &mut impl Rig, load: Load, guess: f64, until: Duration) -> Option<f64> {
    let in_flight = load.chunk * load.depth;
    if in_flight > MOST_IN_FLIGHT {
        return None;
    }
    let time = probe_time(in_flight as f64, guess);
    let mut rates = Vec::with_capacity(REPEATS);
    for repeat in 0..REPEATS {
        let left = until.saturating_sub(rig.elapsed());
        let missing = if repeat == 0 { 1 } else { (REPEATS - repeat) as u32 };
        if left < time * missing {
            break;
        }
        rates.push(rig.run(&[load], time).remove(0)?);
    }
    middle(rates)
}

fn probe_time(in_flight: f64, rate: f64) -> Duration {
    let seconds = FILLS * in_flight / rate.max(1.0);
    MIN_PROBE.max(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

fn middle(mut rates: Vec<f64>) -> Option<f64> {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

/// Reads several drives at once, each with its own best setting, and books the middle of as many probes as fit, at least one, where
/// that is more than what is booked already.
fn book_together(rig: &mut impl Rig, speeds: &mut [Option<DriveSpeed>], drives: &[usize], until: Duration) {
    let loads = loads(speeds, drives);
    let time = wide_probe_time(speeds, drives);
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); drives.len()];
    for repeat in 0..REPEATS {
        if repeat > 0 && until.saturating_sub(rig.elapsed()) < time {
            break;
        }
        for (place, rate) in rig.run(&loads, time).into_iter().enumerate() {
            rates[place].extend(rate);
        }
    }
    for (&drive, rates) in drives.iter().zip(rates) {
        if let (Some(speed), Some(rate)) = (&mut speeds[drive], middle(rates)) {
            speed.together = speed.together.max(rate as u64);
            speed.alone = speed.alone.max(rate as u64);
        }
    }
}

/// Drives that give clearly less together than alone.
fn slowed(speeds: &[Option<DriveSpeed>]) -> Vec<usize> {
    let slow = |speed: &DriveSpeed| (speed.together as f64) < SHARED_BELOW * speed.alone as f64;
    (0..speeds.len())
        .filter(|&drive| speeds[drive].as_ref().is_some_and(slow))
        .collect()
}

fn loads(speeds: &[Option<DriveSpeed>], drives: &[usize]) -> Vec<Load> {
    let load = |&drive: &usize| {
        speeds[drive].as_ref().map(|speed| Load {
            drive,
            chunk: speed.chunk_bytes,
            depth: speed.depth,
        })
    };
    drives.iter().filter_map(load).collect()
}

/// Time in which the slowest of some drives delivers its fills.
fn wide_probe_time(speeds: &[Option<DriveSpeed>], drives: &[usize]) -> Duration {
    let of = |&drive: &usize| {
        let speed = speeds[drive].as_ref()?;
        Some(probe_time((speed.chunk_bytes * speed.depth) as f64, speed.alone as f64))
    };
    drives
        .iter()
        .filter_map(of)
        .max()
        .unwrap_or_default()
        .max(MIN_WIDE_PROBE)
}

/// Drives that share a bottleneck: parts of one disk, and pairs that slow each other down. Slowed drives that no pair explains, or
/// whose pairs the time does not allow, are one group: only all of them together reach their limit.
fn groups(rig: &mut impl Rig, speeds: &[Option<DriveSpeed>], until: Duration) -> Vec<Vec<usize>> {
    let mut group: Vec<usize> = (0..speeds.len()).collect();
    let join = |group: &mut Vec<usize>, a: usize, b: usize| {
        let (from, to) = (group[a].max(group[b]), group[a].min(group[b]));
        group.iter_mut().filter(|of| **of == from).for_each(|of| *of = to);
    };
    let pairs = |of: &[usize]| -> Vec<(usize, usize)> {
        let after = |place: usize| of[place + 1..].iter().map(move |&b| (of[place], b));
        (0..of.len()).flat_map(after).collect()
    };
    for (a, b) in pairs(&(0..speeds.len()).collect::<Vec<_>>()) {
        if rig.same_disk(a, b) {
            join(&mut group, a, b);
        }
    }
    let alone = |drive: usize| speeds[drive].as_ref().map_or(0.0, |speed| speed.alone as f64);
    let slowed = slowed(speeds);
    for (a, b) in pairs(&slowed) {
        let pair = [a, b];
        if group[a] == group[b] || until.saturating_sub(rig.elapsed()) < wide_probe_time(speeds, &pair) {
            continue;
        }
        let rates = rig.run(&loads(speeds, &pair), wide_probe_time(speeds, &pair));
        let sum: f64 = rates.iter().flatten().sum();
        if sum < SHARED_BELOW * (alone(a) + alone(b)) {
            join(&mut group, a, b);
        }
    }
    let members = |group: &[usize], of: usize| group.iter().filter(|&&other| other == group[of]).count();
    let unexplained: Vec<usize> = slowed
        .iter()
        .copied()
        .filter(|&drive| members(&group, drive) == 1)
        .collect();
    for &drive in unexplained.iter().skip(1) {
        join(&mut group, unexplained[0], drive);
    }
    (0..group.len())
        .filter(|&first| group[first] == first && members(&group, first) > 1)
        .map(|first| (0..group.len()).filter(|&drive| group[drive] == first).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;

    /// Drives of known speed in virtual time. A read takes its latency and then its bytes at the drive's rate.
    struct Model {
        drives: Vec<Spec>,
        /// Members and their common limit in bytes per second.
        links: Vec<(Vec<usize>, f64)>,
        now: Duration,
        runs: usize,
    }

    #[derive(Clone, Copy)]
    struct Spec {
        rate: f64,
        latency: f64,
        disk: usize,
        readable: bool,
    }

    fn spec(rate_mb: f64, latency_us: f64) -> Spec {
        Spec {
            rate: rate_mb * MB,
            latency: latency_us * 1e-6,
            disk: usize::MAX,
            readable: true,
        }
    }

    fn model(drives: &[Spec], links: &[(&[usize], f64)]) -> Model {
        Model {
            drives: drives.to_vec(),
            links: links.iter().map(|&(members, mb)| (members.to_vec(), mb * MB)).collect(),
            now: Duration::ZERO,
            runs: 0,
        }
    }

    impl Rig for Model {
        fn drives(&self) -> usize {
            self.drives.len()
        }

        fn run(&mut self, loads: &[Load], time: Duration) -> Vec<Option<f64>> {
            self.runs += 1;
            let mut rates: Vec<f64> = loads
                .iter()
                .map(|load| {
                    let Spec { rate, latency, .. } = self.drives[load.drive];
                    let one = load.chunk as f64 / (latency + load.chunk as f64 / rate);
                    rate.min(one * load.depth as f64)
                })
                .collect();
            for (members, limit) in &self.links {
                let member = |place: &usize| members.contains(&loads[*place].drive);
                let on: Vec<usize> = (0..loads.len()).filter(member).collect();
                let sum: f64 = on.iter().map(|&place| rates[place]).sum();
                on.iter().for_each(|&place| rates[place] *= (limit / sum).min(1.0));
            }
            // The reads in flight at the end are waited for.
            let drain = loads
                .iter()
                .zip(&rates)
                .map(|(load, rate)| (load.chunk * load.depth) as f64 / rate);
            self.now += time + Duration::from_secs_f64(drain.fold(0.0, f64::max));
            let readable = |(load, rate): (&Load, f64)| self.drives[load.drive].readable.then_some(rate);
            loads.iter().zip(rates).map(readable).collect()
        }

        fn elapsed(&self) -> Duration {
            self.now
        }

        fn same_disk(&self, a: usize, b: usize) -> bool {
            let disk = self.drives[a].disk;
            disk != usize::MAX && disk == self.drives[b].disk
        }
    }

    const BUDGET: Duration = Duration::from_millis(900);

    fn settings(found: &Found) -> Vec<(usize, usize)> {
        let speeds = found.speeds.iter().flatten();
        speeds.map(|speed| (speed.chunk_bytes >> 10, speed.depth)).collect()
    }

    fn close(found: u64, expected_mb: f64) {
        let (found, expected) = (found as f64, expected_mb * MB);
        assert!((found - expected).abs() < 0.04 * expected, "{found} against {expected}");
    }

    #[test]
    fn drives_get_their_ceilings_and_settings_within_the_budget() {
        let drives = [
            spec(14_000.0, 80.0),
            spec(7_000.0, 80.0),
            spec(2_000.0, 100.0),
            spec(500.0, 2000.0),
        ];
        let mut rig = model(&drives, &[]);
        let found = search(&mut rig, BUDGET);
        assert!(rig.now < BUDGET, "{:?}", rig.now);
        for (speed, mb) in found.speeds.iter().flatten().zip([14_000.0, 7_000.0, 2_000.0, 500.0]) {
            close(speed.alone, mb);
            close(speed.together, mb);
        }
        // The fast ones get chunks of at least 0.1 ms, the slow ones the smallest that reach the ceiling.
        assert_eq!(settings(&found)[..3], [(2048, 2), (1024, 2), (512, 2)]);
        assert!(found.groups.is_empty());
    }

    #[test]
    fn a_drive_of_long_latency_gets_more_in_flight() {
        let found = search(&mut model(&[spec(3_000.0, 3_000.0)], &[]), BUDGET);
        let (chunk, depth) = settings(&found)[0];
        assert!(chunk * depth >= 8 << 10, "{chunk} KiB, {depth}");
        close(found.speeds[0].as_ref().unwrap().alone, 3_000.0);
    }

    #[test]
    fn one_flat_drive_takes_few_probes() {
        let mut rig = model(&[spec(1_000.0, 1.0)], &[]);
        let found = search(&mut rig, BUDGET);
        assert_eq!(settings(&found), [(512, 1)]);
        assert!(rig.runs <= 1 + 5 * REPEATS, "{} probes", rig.runs);
    }

    #[test]
    fn slow_drives_do_not_break_the_budget() {
        let mut rig = model(&[spec(20.0, 5_000.0), spec(80.0, 100.0)], &[]);
        let found = search(&mut rig, BUDGET);
        assert!(rig.now < BUDGET * 3 / 2, "{:?}", rig.now);
        close(found.speeds[1].as_ref().unwrap().alone, 80.0);
        assert!(found.speeds[0].is_some());
    }

    #[test]
    fn pairs_behind_one_link_are_found() {
        let drives = [
            spec(6_000.0, 80.0),
            spec(6_000.0, 80.0),
            spec(6_000.0, 80.0),
            spec(5_000.0, 80.0),
        ];
        let found = search(&mut model(&drives, &[(&[1, 3], 7_000.0)]), BUDGET);
        assert_eq!(found.groups, [[1, 3]]);
        let sum: u64 = [1, 3]
            .map(|drive: usize| found.speeds[drive].as_ref().unwrap().together)
            .iter()
            .sum();
        close(sum, 7_000.0);
        close(found.speeds[0].as_ref().unwrap().together, 6_000.0);
    }

    #[test]
    fn a_link_that_no_pair_fills_makes_one_group() {
        let drives = [spec(3_000.0, 80.0); 4];
        let found = search(&mut model(&drives, &[(&[0, 1, 2], 6_500.0)]), BUDGET);
        assert_eq!(found.groups, [[0, 1, 2]]);
    }

    #[test]
    fn parts_of_one_disk_are_a_group_whatever_they_give() {
        let mut drives = [spec(3_000.0, 80.0); 3];
        (drives[0].disk, drives[2].disk) = (5, 5);
        assert_eq!(search(&mut model(&drives, &[]), BUDGET).groups, [[0, 2]]);
    }

    #[test]
    fn what_cannot_be_read_has_no_speed_and_spares_the_others() {
        let mut drives = [spec(3_000.0, 80.0); 3];
        drives[1].readable = false;
        let found = search(&mut model(&drives, &[]), BUDGET);
        let measured: Vec<bool> = found.speeds.iter().map(Option::is_some).collect();
        assert_eq!(measured, [true, false, true]);
        assert!(search(&mut model(&[], &[]), BUDGET).speeds.is_empty());
    }
}
