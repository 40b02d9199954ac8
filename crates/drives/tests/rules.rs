//! The rules by which drives pull, one by one, on simulated drives with exact expectations.

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::sim::{SimStream, SimWorld};
use drives::{
    Arena, Clock, DriveTuning, Error, ExpertId, Extent, FAILURES_OUT, LATE_FLOOR_NS, LayoutBuilder, Notice, Notices,
    PAGE_BYTES, ReadClass, ReadEvent, SimBackend, SimDrive, SimFaults, Source, StreamOptions, Streamer, VirtualClock,
};

const PAGE: u64 = PAGE_BYTES as u64;
const KIB: u64 = 1024;

/// Drives that hold an expert.
const ONE: &[usize] = &[0];
const BOTH: &[usize] = &[0, 1];
const ALL: &[usize] = &[0, 1, 2];

fn id(expert: u32) -> ExpertId {
    ExpertId { layer: 1, expert }
}

fn ids(experts: std::ops::Range<u32>) -> Vec<ExpertId> {
    experts.map(id).collect()
}

fn extent(len: u64) -> Extent {
    Extent { page_offset: 0, len }
}

/// A sound drive of this many GB/s.
fn drive(gb: u64) -> SimDrive {
    SimDrive {
        rate: gb * 1_000_000_000,
        ..SimDrive::default()
    }
}

/// The drives' rates are known, chunks have 64 KiB and shrink to 8 KiB.
fn options(drives: &[SimDrive]) -> StreamOptions {
    let tuning = |drive: &SimDrive| DriveTuning {
        rate: Some(drive.rate),
        ..DriveTuning::default()
    };
    StreamOptions {
        chunk_bytes: 64 << 10,
        floor_bytes: 8 << 10,
        tuning: drives.iter().map(tuning).collect(),
        ..StreamOptions::default()
    }
}

/// One expert of `len` bytes for each entry, on the drives that it names.
fn start(homes: &[&[usize]], len: u64, slots: usize, drives: &[SimDrive]) -> SimStream {
    start_with(homes, len, slots, drives, &options(drives))
}

fn start_with(homes: &[&[usize]], len: u64, slots: usize, drives: &[SimDrive], options: &StreamOptions) -> SimStream {
    let mut world = SimWorld::new(drives.len());
    for (expert, homes) in homes.iter().enumerate() {
        world.whole(id(expert as u32), &[extent(len)], homes);
    }
    world.start(slots, drives, options, 1)
}

/// Events in the order of issue.
fn issued(stream: &SimStream) -> Vec<ReadEvent> {
    let mut events = stream.streamer.events(0).events;
    events.sort_by_key(|event| (event.issued_ns, event.landed_ns));
    events
}

fn experts_in_order(events: &[ReadEvent]) -> Vec<u32> {
    let mut experts: Vec<u32> = events.iter().map(|event| event.expert.expert).collect();
    experts.dedup();
    experts
}

fn gone(stall: f64, stall_ns: u64) -> SimFaults {
    SimFaults {
        stall,
        stall_ns,
        ..SimFaults::default()
    }
}

#[test]
fn what_few_drives_hold_is_read_first() {
    let drives = [SimDrive { depth: 1, ..drive(4) }; 3];
    let mut stream = start(&[&[0, 1, 2], &[0, 1], &[0], &[1, 2]], 256 * KIB, 4, &drives);
    stream.take(&ids(0..4));
    let events = issued(&stream);
    let of = |place: usize| -> Vec<ReadEvent> {
        events
            .iter()
            .copied()
            .filter(|event| event.drive.index() == place)
            .collect()
    };
    assert_eq!(experts_in_order(&of(0))[0], 2, "one home first");
    assert_eq!(experts_in_order(&of(1))[0], 1, "two homes before three");
    assert_eq!(experts_in_order(&of(2))[0], 3);
    let last = issued(&stream).pop().unwrap();
    assert_eq!(last.expert, id(0), "what all hold evens out the end");
}

#[test]
fn an_expert_is_finished_before_the_next_is_started() {
    let drives = [drive(4), drive(2)];
    let mut stream = start(&[BOTH; 6], 256 * KIB, 6, &drives);
    stream.take(&ids(0..6));
    let events = issued(&stream);
    let times = |expert| {
        events
            .iter()
            .filter(move |event| event.expert == id(expert))
            .map(|event| event.issued_ns)
    };
    for expert in 1..6 {
        assert!(times(expert - 1).max() <= times(expert).min(), "expert {expert}");
    }
}

#[test]
fn earlier_barriers_come_first_and_hints_last() {
    let drives = [drive(4)];
    let mut stream = start(&[ONE; 4], 256 * KIB, 4, &drives);
    let _hint = stream.streamer.hint(&[id(0)]).unwrap();
    let first = stream.streamer.demand(&[id(1)]).unwrap();
    let second = stream.streamer.demand(&[id(2)]).unwrap();
    for barrier in [&first, &second] {
        assert!(stream.streamer.next(barrier).unwrap().is_some());
    }
    stream.streamer.wait_for_reads();
    let events = issued(&stream);
    let chunk = events.iter().take_while(|event| event.class == ReadClass::Hint);
    assert_eq!(
        chunk.map(|event| event.device_bytes).sum::<u64>(),
        64 * KIB,
        "one chunk was on its way"
    );
    assert_eq!(experts_in_order(&events), [0, 1, 2, 0]);
}

#[test]
fn a_later_barrier_takes_only_slots_that_the_earlier_does_not_need() {
    for (slots, expected) in [(2, 0), (3, 1)] {
        // Expert 2 is alone on the second drive, which could read it at once.
        let mut stream = start(&[&[0], &[0], &[1]], 64 * KIB, slots, &[drive(4), drive(4)]);
        let _first = stream.streamer.demand(&ids(0..2)).unwrap();
        let _second = stream.streamer.demand(&[id(2)]).unwrap();
        let early = stream.streamer.drive_counters()[1].in_flight;
        assert_eq!(early, expected, "{slots} slots");
    }
}

#[test]
fn hints_delay_a_demand_by_one_chunk_at_most() {
    let drives = [drive(4), drive(1)];
    let time = |hinted: bool| {
        let mut stream = start(&[BOTH; 12], 512 * KIB, 12, &drives);
        let _hint = hinted.then(|| stream.streamer.hint(&ids(4..12)).unwrap());
        stream.take(&ids(0..4));
        let report = stream.streamer.barriers(0).barriers[0];
        let hints = stream.streamer.events(0).events;
        (
            report.time_ns,
            hints.iter().filter(|event| event.class == ReadClass::Hint).count(),
        )
    };
    let ((alone, none), (behind, some)) = (time(false), time(true));
    assert!(none == 0 && some > 0);
    // The chunks before it: 64 KiB on each drive.
    let chunks = 2 * 64 * KIB / 5;
    assert!(
        behind <= alone + chunks + 8 * KIB,
        "{behind} ns behind hints, {alone} ns alone"
    );
    assert!(behind > alone, "the measure sees the hint");
}

#[test]
fn while_a_demand_waits_elsewhere_a_drive_has_one_chunk_of_hints_in_flight() {
    // The slow drive holds all that is demanded; the fast one has only hints to read.
    let drives = [drive(8), drive(1)];
    let mut stream = start(&[&[1], &[0], &[0]], 1024 * KIB, 3, &drives);
    let _hint = stream.streamer.hint(&ids(1..3)).unwrap();
    stream.take(&[id(0)]);
    let mut in_flight = 0i64;
    let mut changes = Vec::new();
    for event in stream.streamer.events(0).events {
        if event.class == ReadClass::Hint {
            changes.push((event.issued_ns, 1, event.device_bytes as i64));
            changes.push((event.landed_ns, 0, -(event.device_bytes as i64)));
        }
    }
    changes.sort_unstable();
    let most = changes.into_iter().map(|(.., change)| {
        in_flight += change;
        in_flight
    });
    assert_eq!(
        most.max(),
        Some(64 * KIB as i64),
        "a full chunk, in parts that keep the depth"
    );
    let counters = stream.streamer.drive_counters();
    assert_eq!((counters[0].bytes, counters[0].most_in_flight), (2 * 1024 * KIB, 4));
}

#[test]
fn a_hint_that_is_demanded_is_not_read_again() {
    let drives = [drive(4)];
    let mut stream = start(&[ONE; 4], 256 * KIB, 4, &drives);
    let hint = stream.streamer.hint(&ids(0..3)).unwrap();
    assert_eq!(hint.left(), 3);
    // Expert 0 is demanded in the middle of its reads.
    stream.take(&[id(0)]);
    stream.streamer.wait_for_reads();
    let before = stream.balance();
    assert_eq!(before.device_bytes, 3 * 256 * KIB);
    assert_eq!(before.pending_device_bytes, 2 * 256 * KIB);
    stream.take(&ids(1..4));
    assert_eq!(hint.left(), 0);
    let after = stream.balance();
    assert_eq!(after.device_bytes, 4 * 256 * KIB);
    assert_eq!((after.needed_device_bytes, after.hints_used), (4 * 256 * KIB, 3));
    let reports = stream.streamer.barriers(0).barriers;
    assert_eq!(reports[1].waiting_bytes, 256 * KIB, "of three experts, two were there");
    // All was there.
    let hint = stream.streamer.hint(&[id(0)]).unwrap();
    stream.streamer.wait_for_reads();
    stream.take(&[id(0)]);
    let report = stream.streamer.barriers(2).barriers[0];
    assert_eq!(
        (report.waiting_bytes, report.bound_ns, report.time_ns, report.last_drive),
        (0, 0, 0, None)
    );
    drop(hint);
    assert_eq!(stream.balance().wasted_device_bytes, 0);
}

#[test]
fn a_dropped_hint_is_given_up_and_counted() {
    let drives = [drive(4)];
    let mut stream = start(&[ONE; 4], 256 * KIB, 4, &drives);
    let hint = stream.streamer.hint(&ids(0..4)).unwrap();
    drop(hint);
    stream.streamer.wait_for_reads();
    let counters = stream.balance();
    assert_eq!(counters.wasted_device_bytes, 64 * KIB, "what was in flight");
    assert_eq!(counters.device_bytes, 64 * KIB);
    assert_eq!(stream.streamer.arena().free_slots(), 4);
}

#[test]
fn hints_take_no_slot_that_a_barrier_needs() {
    let drives = [drive(4)];
    let mut stream = start(&[ONE; 6], 64 * KIB, 2, &drives);
    // Two barriers of one: no slot is left for a hint.
    let first = stream.streamer.demand(&[id(0)]).unwrap();
    let second = stream.streamer.demand(&[id(1)]).unwrap();
    let hint = stream.streamer.hint(&ids(2..4)).unwrap();
    stream.streamer.wait_for_reads();
    assert_eq!(stream.balance().device_bytes, 2 * 64 * KIB);
    // Their slots come back: both hints land.
    for barrier in [&first, &second] {
        drop(stream.streamer.next(barrier).unwrap());
    }
    stream.streamer.wait_for_reads();
    assert_eq!((stream.balance().device_bytes, hint.left()), (4 * 64 * KIB, 2));
    // A barrier needs one slot: the last hint gives its own up. It needs two: so does the other.
    stream.take(&[id(4)]);
    assert_eq!((stream.balance().wasted_device_bytes, hint.left()), (64 * KIB, 1));
    stream.take(&ids(4..6));
    assert_eq!((stream.balance().wasted_device_bytes, hint.left()), (2 * 64 * KIB, 0));
}

#[test]
fn pieces_shrink_towards_the_end_and_all_drives_end_together() {
    let drives = [drive(8), drive(4), drive(2)];
    let mut stream = start(&[ALL; 8], 1024 * KIB, 8, &drives);
    stream.take(&ids(0..8));
    let events = issued(&stream);
    let largest = events.iter().map(|event| event.device_bytes).max().unwrap();
    assert_eq!(largest, 64 * KIB, "while there is plenty, a piece is a chunk");
    let ends: Vec<u64> = (0..3)
        .map(|place| {
            events
                .iter()
                .filter(|event| event.drive.index() == place)
                .map(|event| event.landed_ns)
                .max()
                .unwrap()
        })
        .collect();
    let (first, last) = (ends.iter().min().unwrap(), ends.iter().max().unwrap());
    // The smallest piece takes the slowest drive 4.1 microseconds; a chunk would take it 33.
    assert!(last - first < 2 * 4100, "{ends:?}");
    let report = stream.streamer.barriers(0).barriers[0];
    assert!(
        report.bound_ns <= report.time_ns && report.time_ns < report.bound_ns + 2 * 4100,
        "{report:?}"
    );
    assert_eq!((report.experts, report.device_bytes), (8, 8 * 1024 * KIB));
}

#[test]
fn what_only_one_drive_holds_is_not_cut_small() {
    let drives = [drive(4), drive(4)];
    let mut stream = start(&[&[0], &[0], &[1]], 1024 * KIB, 3, &drives);
    stream.take(&ids(0..3));
    let events = stream.streamer.events(0).events;
    assert!(events.iter().all(|event| event.device_bytes == 64 * KIB));
}

#[test]
fn pieces_have_the_size_and_number_that_each_drive_likes() {
    let drives = [SimDrive { depth: 8, ..drive(4) }; 2];
    let mut options = options(&drives);
    options.tuning[0].chunk_bytes = Some(256 << 10);
    options.tuning[0].depth = Some(2);
    options.tuning[1].depth = Some(99);
    let mut stream = start_with(&[&[0], &[1]], 1024 * KIB, 2, &drives, &options);
    stream.take(&ids(0..2));
    let events = stream.streamer.events(0).events;
    let sizes = |place| {
        events
            .iter()
            .filter(move |event| event.drive.index() == place)
            .map(|event| event.device_bytes)
    };
    assert!(sizes(0).all(|bytes| bytes == 256 * KIB) && sizes(1).all(|bytes| bytes == 64 * KIB));
    let counters = stream.streamer.drive_counters();
    assert_eq!([counters[0].most_in_flight, counters[1].most_in_flight], [2, 8]);
}

#[test]
fn a_slow_drive_leaves_a_piece_to_a_fast_one() {
    let drives = [
        SimDrive {
            rate: 10_000_000,
            ..drive(1)
        },
        drive(10),
    ];
    let mut stream = start(&[BOTH; 4], 256 * KIB, 4, &drives);
    stream.take(&ids(0..4));
    let counters = stream.streamer.drive_counters();
    assert_eq!((counters[0].reads, counters[1].bytes), (0, 4 * 256 * KIB));
    assert!(
        counters[0].idle_ns > 0,
        "it had nothing to do although something waited"
    );
    // What it alone holds it reads.
    let mut stream = start(&[&[0, 1], &[0]], 256 * KIB, 4, &drives);
    stream.take(&ids(0..2));
    assert_eq!(stream.streamer.drive_counters()[0].bytes, 256 * KIB);
}

#[test]
fn a_drive_that_slows_down_is_given_less() {
    // Nothing is known of the drives at first.
    let drives = [drive(4), drive(4)];
    let tuning = Vec::new();
    let mut stream = start_with(
        &[BOTH; 16],
        4096 * KIB,
        16,
        &drives,
        &StreamOptions { tuning, ..options(&[]) },
    );
    let shares = |stream: &mut SimStream| {
        let before: Vec<u64> = stream
            .streamer
            .drive_counters()
            .iter()
            .map(|drive| drive.bytes)
            .collect();
        stream.take(&ids(0..16));
        let after = stream.streamer.drive_counters();
        (after[0].bytes - before[0]) as f64 / (after[1].bytes - before[1]) as f64
    };
    shares(&mut stream);
    assert!((shares(&mut stream) - 1.0).abs() < 0.03);
    stream.control.set_rate(stream.drives[0], 2_000_000_000);
    for _ in 0..4 {
        shares(&mut stream);
    }
    assert!((shares(&mut stream) - 0.5).abs() < 0.02);
    let rates: Vec<f64> = stream
        .streamer
        .drive_counters()
        .iter()
        .map(|drive| drive.rate as f64 / 1e9)
        .collect();
    assert!(
        (rates[0] - 2.0).abs() < 0.1 && (rates[1] - 4.0).abs() < 0.1,
        "{rates:?}"
    );
    let report = *stream.streamer.barriers(0).barriers.last().unwrap();
    assert!(report.time_ns as f64 <= report.bound_ns as f64 * 1.02, "{report:?}");
}

#[test]
fn a_late_piece_is_read_elsewhere_and_the_first_to_land_counts() {
    const LATE: u64 = 5_000_000_000;
    let drives = [drive(4), drive(4)];
    let mut stream = start(&[BOTH; 3], 100 * KIB, 3, &drives);
    stream.control.set_faults(stream.drives[0], gone(1.0, LATE));
    stream.take(&[id(0)]);
    let now = stream.clock.now_ns();
    assert!((LATE_FLOOR_NS..LATE_FLOOR_NS + 1_000_000).contains(&now), "{now} ns");
    let counters = stream.balance();
    assert!(counters.rereads > 0);
    // The expert was handed out in its second slot. The first one still belongs to the late reads.
    assert_eq!(stream.streamer.arena().free_slots(), 2);
    stream.control.set_faults(stream.drives[0], SimFaults::default());
    stream.take(&ids(1..3));
    assert_eq!(
        stream.balance().reread_device_bytes,
        0,
        "the late reads have not landed"
    );
    stream.streamer.wait_for_reads();
    assert!(stream.clock.now_ns() >= LATE);
    let counters = stream.balance();
    assert!(counters.reread_device_bytes > 0);
    assert_eq!(counters.needed_device_bytes, 3 * 100 * KIB);
    assert_eq!(stream.streamer.arena().free_slots(), 3);
}

#[test]
fn the_first_read_may_still_win() {
    // The second read is late too, and later than the first.
    let drives = [drive(4), drive(4)];
    let mut stream = start(&[&[0, 1]], 8 * KIB, 2, &drives);
    stream
        .control
        .set_faults(stream.drives[0], gone(1.0, LATE_FLOOR_NS + 1_000_000));
    stream
        .control
        .set_faults(stream.drives[1], gone(1.0, LATE_FLOOR_NS + 1_000_000));
    let barrier = stream.streamer.demand(&[id(0)]).unwrap();
    let landed = stream.streamer.next(&barrier).unwrap().unwrap();
    assert_eq!(stream.clock.now_ns() / 1000, (LATE_FLOOR_NS + 1_000_000 + 2048) / 1000);
    assert_eq!(stream.balance().rereads, 1);
    assert_eq!(
        stream.streamer.arena().free_slots(),
        0,
        "the second slot is still written to"
    );
    stream.streamer.wait_for_reads();
    assert!(stream.is_right(&landed));
    assert_eq!(stream.streamer.arena().free_slots(), 1);
    assert_eq!(stream.balance().reread_device_bytes, 8 * KIB);
}

#[test]
fn a_late_piece_without_a_second_home_or_slot_is_waited_for() {
    const LATE: u64 = 5_000_000_000;
    for (homes, slots) in [(&[0usize][..], 3), (&[0, 1][..], 1)] {
        let drives = [drive(4), drive(4)];
        let mut stream = start(&[homes], 100 * KIB, slots, &drives);
        for &drive in &stream.drives.clone() {
            stream.control.set_faults(drive, gone(1.0, LATE));
        }
        stream.take(&[id(0)]);
        assert!(stream.clock.now_ns() >= LATE);
        assert_eq!(stream.balance().rereads, 0);
    }
}

#[test]
fn slowness_is_not_lateness() {
    // Nothing is known of drives that take 0.6 s for what is in flight at first.
    let drives = [SimDrive {
        rate: 20_000_000,
        ..drive(1)
    }; 2];
    let options = StreamOptions {
        chunk_bytes: 4 << 20,
        ..StreamOptions::default()
    };
    let mut stream = start_with(&[BOTH; 4], 8 << 20, 4, &drives, &options);
    stream.take(&ids(0..4));
    assert_eq!(stream.balance().rereads, 0);
}

#[test]
fn noise_is_not_lateness() {
    let noisy = SimDrive {
        latency_tail_ns: 2_000_000,
        jitter: 0.9,
        ..drive(1)
    };
    let mut stream = start(&[BOTH; 16], 512 * KIB, 8, &[noisy, noisy]);
    for _ in 0..20 {
        stream.take(&ids(0..16));
    }
    assert_eq!(stream.balance().rereads, 0);
}

#[test]
fn a_failed_piece_is_read_from_another_home_and_a_failing_drive_is_out() {
    let drives = [drive(4), drive(4)];
    let notices = Notices::default();
    let options = StreamOptions {
        notices: notices.clone(),
        ..options(&drives)
    };
    let mut stream = start_with(&[&[0, 1], &[0, 1], &[0]], 512 * KIB, 3, &drives, &options);
    let broken = SimFaults {
        error: 1.0,
        ..SimFaults::default()
    };
    stream.control.set_faults(stream.drives[0], broken);
    stream.take(&ids(0..2));
    let failed = stream.streamer.drive_counters()[0].failed_reads;
    assert!(
        (u64::from(FAILURES_OUT)..u64::from(FAILURES_OUT) + 4).contains(&failed),
        "{failed}"
    );
    let told = notices.take();
    let [Notice::DriveOut { drive, .. }] = &told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(drive, "drive-0");
    assert!(told[0].to_string().contains("os error 5"), "{}", told[0]);
    stream.take(&ids(0..2));
    assert_eq!(
        stream.streamer.drive_counters()[0].failed_reads,
        failed,
        "it is not asked any more"
    );

    // What no other drive holds is asked of it all the same, and the failure says all.
    let barrier = stream.streamer.demand(&[id(2)]).unwrap();
    let error = stream.streamer.next(&barrier).unwrap_err();
    assert!(matches!(error, Error::Expert { expert, .. } if expert == id(2)));
    let text = error.to_string();
    for part in [
        "expert 1/2",
        "drive drive-0",
        "experts: wanted",
        "os error 5",
        "another copy",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
    drop(barrier);
    stream.streamer.wait_for_reads();

    stream.control.set_faults(stream.drives[0], SimFaults::default());
    stream.take(&[id(2)]);
    assert_eq!(
        notices.take(),
        [Notice::DriveBack {
            drive: "drive-0".into()
        }]
    );
    let before = stream.streamer.drive_counters()[0].reads;
    stream.take(&ids(0..2));
    assert!(
        stream.streamer.drive_counters()[0].reads > before,
        "it is read as before"
    );
    stream.balance();
}

#[test]
fn a_drive_that_vanishes_costs_speed_and_nothing_else() {
    let drives = [drive(8), drive(1)];
    let mut stream = start(&[BOTH; 8], 1024 * KIB, 8, &drives);
    let barrier = stream.streamer.demand(&ids(0..8)).unwrap();
    let first = stream.streamer.next(&barrier).unwrap().unwrap();
    assert!(stream.is_right(&first));
    stream.control.vanish(stream.drives[0]);
    let mut count = 1;
    while let Some(landed) = stream.streamer.next(&barrier).unwrap() {
        assert!(stream.is_right(&landed));
        count += 1;
    }
    assert_eq!(count, 8);
    let report = stream.streamer.barriers(0).barriers[0];
    assert_eq!(report.last_drive, Some(stream.drives[1]));
}

#[test]
fn corruption_is_seen_in_the_bytes_alone() {
    let drives = [drive(4)];
    let mut stream = start(&[&[0]], 64 * KIB, 1, &drives);
    let rotten = SimFaults {
        corrupt: 1.0,
        ..SimFaults::default()
    };
    stream.control.set_faults(stream.drives[0], rotten);
    let barrier = stream.streamer.demand(&[id(0)]).unwrap();
    let landed = stream.streamer.next(&barrier).unwrap().unwrap();
    assert!(!stream.is_right(&landed));
}

#[test]
fn dropped_barriers_are_waste() {
    let drives = [drive(4), drive(4)];
    let mut stream = start(&[BOTH; 4], 256 * KIB, 4, &drives);
    let barrier = stream.streamer.demand(&ids(0..4)).unwrap();
    drop(stream.streamer.next(&barrier).unwrap());
    drop(barrier);
    stream.streamer.wait_for_reads();
    let counters = stream.balance();
    assert_eq!(
        (counters.needed_device_bytes, counters.pending_device_bytes),
        (256 * KIB, 0)
    );
    assert!(counters.wasted_device_bytes > 0);
    assert!(stream.streamer.barriers(0).barriers.is_empty(), "it was never complete");
}

#[test]
fn wrong_hints_and_settings_are_refused() {
    let drives = [drive(4)];
    let mut stream = start(&[&[0]], 64 * KIB, 1, &drives);
    let unknown = stream.streamer.hint(&[id(0), id(9)]).unwrap_err();
    assert!(matches!(unknown, Error::UnknownExpert(expert) if expert == id(9)));
    let twice = stream.streamer.hint(&[id(0), id(0)]).unwrap();
    assert_eq!(twice.left(), 1, "a guess may name an expert twice");

    let with = |options: StreamOptions, drives: usize| {
        let mut builder = LayoutBuilder::new();
        for place in 0..drives {
            let drive = builder.virtual_drive(&place.to_string());
            let file = builder.virtual_file(drive, "f", PAGE);
            let source = Source {
                file,
                offset: 0,
                len: PAGE,
            };
            builder.expert(id(place as u32), &[source]).unwrap();
        }
        let layout = Arc::new(builder.build().unwrap());
        let clock = Arc::new(VirtualClock::default());
        let backend = SimBackend::new(layout.clone(), &[drive(1)], None, clock.clone(), 0);
        let arena = Arena::new(PAGE_BYTES, PAGE_BYTES).unwrap();
        Streamer::single_threaded(layout, arena, Box::new(backend), clock, &options).map(drop)
    };
    assert!(with(options(&[]), 64).is_ok());
    assert!(matches!(
        with(options(&[]), 65),
        Err(Error::TooManyDrives { found: 65 })
    ));
    let floor_bytes = 5000;
    assert!(matches!(
        with(
            StreamOptions {
                floor_bytes,
                ..options(&[])
            },
            1
        ),
        Err(Error::FloorSize { found: 5000 })
    ));
    let mut odd = options(&drives);
    odd.tuning[0].chunk_bytes = Some(1);
    assert!(matches!(with(odd, 1), Err(Error::ChunkSize { found: 1 })));
}

#[test]
fn events_and_latencies_tell_each_read() {
    let drives = [SimDrive {
        latency_ns: 5000,
        ..drive(4)
    }];
    let mut stream = start(&[ONE; 2], 256 * KIB, 2, &drives);
    stream.take(&ids(0..2));
    let counters = stream.streamer.drive_counters().remove(0);
    assert_eq!((counters.reads, counters.latency.count()), (8, 8));
    // Four in flight: the first waits for its data, the fourth for three others too.
    let one = 64 * KIB / 4;
    assert!(counters.latency.percentile(1.0) >= 5000 + one);
    assert_eq!(counters.latency.longest_ns(), 5000 + 4 * one);
    assert_eq!(counters.busy_ns, stream.clock.now_ns());
    assert_eq!(counters.idle_ns, 0);
    let events = issued(&stream);
    let starts: Vec<(u32, u64)> = events.iter().map(|event| (event.expert.expert, event.start)).collect();
    assert_eq!(
        starts,
        (0..8).map(|n| (n as u32 / 4, n % 4 * 64 * KIB)).collect::<Vec<_>>()
    );
    assert!(
        events
            .iter()
            .all(|event| event.ok && event.asked_ns == 0 && event.barrier == 0)
    );
}

/// A whole layer of a prompt: the decision must not look at all that waits.
#[test]
fn a_decision_costs_the_same_however_much_waits() {
    let drives = [drive(4); 4];
    let holders: Vec<Vec<usize>> = (1usize..16)
        .map(|bits| (0..4).filter(|place| bits >> place & 1 == 1).collect())
        .collect();
    let cost = |experts: u32| {
        let homes: Vec<&[usize]> = (0..experts).map(|expert| &holders[expert as usize % 15][..]).collect();
        let mut stream = start(&homes, 64 * KIB, 16, &drives);
        let barrier = stream.streamer.demand(&ids(0..experts)).unwrap();
        let begin = Instant::now();
        while stream.streamer.next(&barrier).unwrap().is_some() {}
        begin.elapsed().as_secs_f64() / stream.streamer.counters().reads as f64
    };
    let best = |experts: u32| (0..3).map(|_| cost(experts)).fold(f64::INFINITY, f64::min);
    let (few, many) = (best(64), best(4096));
    assert!(
        many < 4.0 * few,
        "{few} s for a piece of 64 experts, {many} s for one of 4096"
    );
}
