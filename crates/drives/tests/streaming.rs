//! What the streamer promises: the right bytes, each asked for once, in bounded memory, whatever fails or is dropped.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use common::{World, arena, id, in_virtual_time, on_threads};
use drives::{
    Backend, Completion, DriveId, Error, Fault, PAGE_BYTES, ReadClass, ReadRequest, StreamOptions, Streamer,
    VirtualClock,
};
use proptest::prelude::*;

const EIO: i32 = 5;

/// Takes a whole barrier, checks every byte and that each expert comes once.
fn take_all(streamer: &mut Streamer, world: &World, experts: &[usize]) {
    let ids: Vec<_> = experts.iter().map(|&expert| id(expert)).collect();
    let barrier = streamer.demand(&ids).unwrap();
    let mut seen = BTreeSet::new();
    while let Some(landed) = streamer.next(&barrier).unwrap() {
        world.check(&landed);
        assert!(seen.insert(landed.expert), "an expert comes once");
    }
    assert_eq!(seen, ids.into_iter().collect());
    assert_eq!(barrier.left(), 0);
}

/// Experts of one to three extents in one to three files; the last extent ends its file inside a page.
fn worlds() -> impl Strategy<Value = World> {
    let extent = (0usize..3, 0u64..70_000, 1u64..50_000);
    let expert = prop::collection::vec(extent, 1..4);
    prop::collection::vec(expert, 1..12).prop_map(|experts| {
        let mut files = vec![1; 3];
        for &(file, offset, len) in experts.iter().flatten() {
            files[file] = files[file].max(offset + len);
        }
        World { files, experts }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn bytes_are_right_from_real_files(world in worlds(), slots in 1usize..5, chunk in 1usize..9) {
        let folder = tempfile::tempdir().unwrap();
        let layout = world.on_disk(folder.path());
        let mut streamer = on_threads(&layout, slots, chunk * PAGE_BYTES);
        let all: Vec<usize> = (0..world.experts.len()).collect();
        take_all(&mut streamer, &world, &all);
        take_all(&mut streamer, &world, &all[..1]);
        let device: u64 = layout.experts().iter().map(|&id| layout.device_bytes(id).unwrap()).sum();
        let once = layout.device_bytes(id(0)).unwrap();
        let counters = streamer.counters();
        prop_assert_eq!(counters.device_bytes, device + once);
        prop_assert_eq!(counters.expert_bytes_read, world.bytes() + layout.expert_bytes(id(0)).unwrap());
        prop_assert_eq!(counters.experts_read as usize, all.len() + 1);
        prop_assert_eq!((counters.wasted_device_bytes, counters.stray_completions), (0, 0));
        prop_assert_eq!(streamer.arena().free_slots(), slots);
    }

    #[test]
    fn bytes_are_right_in_any_landing_order(
        world in worlds(),
        slots in 1usize..5,
        delays in prop::collection::vec(0u64..1000, 0..100),
    ) {
        let layout = world.in_memory();
        let clock = Arc::new(VirtualClock::default());
        let mut backend = world.memory_backend(&layout, &clock);
        for (nth, delay) in delays.into_iter().enumerate() {
            backend.inject(nth as u64, Fault::Delay(delay));
        }
        let mut streamer = in_virtual_time(&layout, slots, 2 * PAGE_BYTES, backend, &clock);
        take_all(&mut streamer, &world, &(0..world.experts.len()).collect::<Vec<_>>());
        prop_assert_eq!(streamer.arena().free_slots(), slots);
    }

    /// Barriers are demanded, taken in part and dropped at random, with leases held across and reads that fail.
    #[test]
    fn nothing_leaks_and_nothing_lands_elsewhere(
        steps in prop::collection::vec((prop::collection::btree_set(0usize..10, 1..8), 0usize..9, any::<bool>()), 1..12),
        faults in prop::collection::vec((0u64..200, prop_oneof![
            (0u64..500).prop_map(Fault::Delay),
            Just(Fault::Error(EIO)),
            (0usize..4096).prop_map(Fault::Short),
        ]), 0..40),
    ) {
        let world = World::row(10, 30_000);
        let layout = world.in_memory();
        let clock = Arc::new(VirtualClock::default());
        let mut backend = world.memory_backend(&layout, &clock);
        for (nth, fault) in faults {
            backend.inject(nth, fault);
        }
        let mut streamer = in_virtual_time(&layout, 3, 2 * PAGE_BYTES, backend, &clock);
        let mut kept = None;
        for (experts, take, keep) in steps {
            let ids: Vec<_> = experts.iter().map(|&expert| id(expert)).collect();
            let barrier = streamer.demand(&ids).unwrap();
            for _ in 0..take {
                match streamer.next(&barrier) {
                    Ok(Some(landed)) => {
                        world.check(&landed);
                        if keep {
                            kept = Some(landed);
                        }
                    }
                    Ok(None) => break,
                    Err(Error::Expert { read, .. }) => {
                        prop_assert!(read.got < read.wanted);
                        break;
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            if let Some(landed) = &kept {
                world.check(landed);
            }
        }
        drop(kept);
        let arena = streamer.arena();
        let counters = streamer.counters();
        let batch = streamer.events(0);
        drop(streamer);
        prop_assert_eq!(arena.free_slots(), 3);
        prop_assert_eq!(batch.events.len() as u64, counters.reads + counters.failed_reads);
        prop_assert_eq!(counters.stray_completions, 0);
    }
}

#[test]
fn a_barrier_flows_through_a_single_slot() {
    let world = World::row(40, 100_000);
    let folder = tempfile::tempdir().unwrap();
    let layout = world.on_disk(folder.path());
    let mut streamer = on_threads(&layout, 1, 4 * PAGE_BYTES);
    take_all(&mut streamer, &world, &(0..40).collect::<Vec<_>>());
}

#[test]
fn a_failed_read_fails_its_barrier_and_nothing_else() {
    let world = World::row(4, 10_000);
    let layout = world.in_memory();
    let clock = Arc::new(VirtualClock::default());
    let mut backend = world.memory_backend(&layout, &clock);
    backend.inject(3, Fault::Error(EIO));
    let mut streamer = in_virtual_time(&layout, 2, PAGE_BYTES, backend, &clock);
    let barrier = streamer.demand(&world.ids()).unwrap();
    let other = streamer.demand(&world.ids()).unwrap();
    let error = loop {
        match streamer.next(&barrier) {
            Ok(landed) => drop(landed.expect("the fourth read fails")),
            Err(error) => break error,
        }
    };
    let text = error.to_string();
    for part in [
        "drive drive-0",
        "shard-0",
        "expert 7/",
        "os error 5",
        "offset",
        "another copy",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
    assert_eq!(streamer.next(&barrier).unwrap_err().to_string(), text);
    assert_eq!(streamer.counters().failed_reads, 1);
    while let Some(landed) = streamer.next(&other).unwrap() {
        world.check(&landed);
    }
    drop(barrier);
    take_all(&mut streamer, &world, &[0, 1, 2, 3]);
    assert_eq!(streamer.arena().free_slots(), 2);
}

#[test]
fn an_expert_without_its_last_byte_is_refused() {
    let world = World::row(1, 10_000);
    let layout = world.in_memory();
    for (arriving, whole) in [(777 + 9_999, false), (777 + 10_000, true)] {
        let clock = Arc::new(VirtualClock::default());
        let mut backend = world.memory_backend(&layout, &clock);
        backend.inject(0, Fault::Short(arriving));
        let mut streamer = in_virtual_time(&layout, 1, 4 * PAGE_BYTES, backend, &clock);
        let barrier = streamer.demand(&[id(0)]).unwrap();
        assert_eq!(streamer.next(&barrier).is_ok(), whole, "{arriving} bytes");
    }
}

#[test]
fn a_real_file_that_shrank_fails_its_barrier() {
    let world = World::row(3, 50_000);
    let folder = tempfile::tempdir().unwrap();
    let layout = world.on_disk(folder.path());
    let mut streamer = on_threads(&layout, 3, 2 * PAGE_BYTES);
    let path = folder.path().join("shard-0");
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(60_000).unwrap();
    take_all(&mut streamer, &world, &[0]);
    let barrier = streamer.demand(&[id(1), id(2)]).unwrap();
    let error = std::iter::from_fn(|| Some(streamer.next(&barrier))).find_map(Result::err);
    let text = error.unwrap().to_string();
    assert!(
        text.contains("end of file; the file is shorter than expected"),
        "{text}"
    );
    drop(barrier);
    take_all(&mut streamer, &world, &[0]);
    assert_eq!(streamer.arena().free_slots(), 3);
}

#[test]
fn late_reads_of_a_dropped_barrier_never_reach_a_new_expert() {
    let world = World::row(6, 20_000);
    let layout = world.in_memory();
    let clock = Arc::new(VirtualClock::default());
    let mut backend = world.memory_backend(&layout, &clock);
    // The first two reads, of expert 0, are still in flight when everything else has landed.
    backend.inject(0, Fault::Delay(1_000_000));
    backend.inject(1, Fault::Delay(2_000_000));
    let mut streamer = in_virtual_time(&layout, 1, 2 * PAGE_BYTES, backend, &clock);
    let arena = streamer.arena();
    let barrier = streamer.demand(&[id(0), id(1)]).unwrap();
    assert_eq!(arena.free_slots(), 0);
    drop(barrier);
    assert_eq!(arena.free_slots(), 0, "two reads still write to the slot");
    take_all(&mut streamer, &world, &[2, 3, 4, 5]);
    let counters = streamer.counters();
    assert_eq!(counters.wasted_device_bytes, 4 * PAGE_BYTES as u64);
    assert_eq!(counters.experts_read, 4);
}

#[test]
fn several_barriers_are_open_at_once() {
    let world = World::row(8, 40_000);
    let folder = tempfile::tempdir().unwrap();
    let layout = world.on_disk(folder.path());
    for slots in [1, 3, 8] {
        let mut streamer = on_threads(&layout, slots, PAGE_BYTES);
        let first = streamer.demand(&[id(0), id(1), id(2)]).unwrap();
        let second = streamer.demand(&[id(2), id(3), id(4)]).unwrap();
        let empty = streamer.demand(&[]).unwrap();
        assert!(streamer.next(&empty).unwrap().is_none());
        for barrier in [&first, &second] {
            for _ in 0..3 {
                world.check(&streamer.next(barrier).unwrap().unwrap());
            }
            assert!(streamer.next(barrier).unwrap().is_none());
        }
        assert!(second.number() > first.number());
    }
}

#[test]
fn holding_every_slot_is_an_error_and_not_a_deadlock() {
    let world = World::row(4, 10_000);
    let layout = world.in_memory();
    let clock = Arc::new(VirtualClock::default());
    let backend = world.memory_backend(&layout, &clock);
    let mut streamer = in_virtual_time(&layout, 2, PAGE_BYTES, backend, &clock);
    let barrier = streamer.demand(&world.ids()).unwrap();
    let held = [(); 2].map(|()| streamer.next(&barrier).unwrap().unwrap());
    let error = streamer.next(&barrier).unwrap_err();
    assert!(
        error.to_string().contains("all 2 slots are held (2 by leases, 0 by"),
        "{error}"
    );
    drop(held);
    assert!(streamer.next(&barrier).unwrap().is_some());

    // With threads the same is told after a while, unless another thread lets go.
    let folder = tempfile::tempdir().unwrap();
    let layout = world.on_disk(folder.path());
    let clock = Arc::new(drives::MonotonicClock::new());
    let notices = drives::Notices::default();
    let backend = drives::ThreadBackend::open(&layout, 1, clock.clone(), &notices).unwrap();
    let options = StreamOptions {
        lease_patience: Duration::from_millis(200),
        ..StreamOptions::default()
    };
    let slots = arena(&layout, 1);
    let mut streamer = Streamer::start(layout, slots, Box::new(backend), clock, &options).unwrap();
    let barrier = streamer.demand(&world.ids()).unwrap();
    let held = streamer.next(&barrier).unwrap().unwrap();
    let error = streamer.next(&barrier).unwrap_err();
    assert!(matches!(error, Error::Stalled { leased: 1, .. }), "{error}");
    let letting_go = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
    });
    let next = streamer.next(&barrier).unwrap().unwrap();
    letting_go.join().unwrap();
    drop(next);

    // Barriers out of order: the second waits for slots that hold the untaken experts of the first.
    drop(barrier);
    let first = streamer.demand(&[id(0)]).unwrap();
    let second = streamer.demand(&[id(1)]).unwrap();
    let error = streamer.next(&second).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Stalled {
                leased: 0,
                unread: 1,
                ..
            }
        ),
        "{error}"
    );
    world.check(&streamer.next(&first).unwrap().unwrap());
    world.check(&streamer.next(&second).unwrap().unwrap());
}

#[test]
fn wrong_demands_and_settings_are_refused() {
    let world = World::row(2, 10_000);
    let layout = world.in_memory();
    let clock = Arc::new(VirtualClock::default());
    let backend = || Box::new(world.memory_backend(&layout, &clock));
    let slots = arena(&layout, 1);
    let options = StreamOptions::default();
    let start = |arena: &Arc<drives::Arena>, options: &StreamOptions| {
        Streamer::single_threaded(layout.clone(), arena.clone(), backend(), clock.clone(), options)
    };
    let mut streamer = start(&slots, &options).unwrap();
    let unknown = streamer.demand(&[id(0), id(9)]).unwrap_err();
    assert!(matches!(unknown, Error::UnknownExpert(expert) if expert == id(9)));
    let twice = streamer.demand(&[id(0), id(0)]).unwrap_err();
    assert!(matches!(twice, Error::DemandedTwice(expert) if expert == id(0)));
    assert_eq!(streamer.counters(), drives::Counters::default());

    assert!(matches!(start(&slots, &options), Err(Error::ArenaInUse)));
    drop(streamer);
    assert!(start(&slots, &options).is_ok());
    let small = drives::Arena::new(PAGE_BYTES, PAGE_BYTES).unwrap();
    assert!(matches!(start(&small, &options), Err(Error::ArenaTooSmall { .. })));
    for chunk_bytes in [0, 1000] {
        let options = StreamOptions {
            chunk_bytes,
            ..options.clone()
        };
        assert!(matches!(start(&slots, &options), Err(Error::ChunkSize { .. })));
    }
}

#[test]
fn every_read_leaves_an_event() {
    let world = World::row(3, 20_000);
    let layout = world.in_memory();
    let clock = Arc::new(VirtualClock::default());
    let mut backend = world.memory_backend(&layout, &clock);
    for nth in 0..100 {
        backend.inject(nth, Fault::Delay(50 + nth));
    }
    let mut streamer = in_virtual_time(&layout, 3, 2 * PAGE_BYTES, backend, &clock);
    take_all(&mut streamer, &world, &[0, 1, 2]);
    let batch = streamer.events(0);
    let (mut bytes, mut device_bytes) = (0, 0);
    for event in &batch.events {
        assert!(event.asked_ns <= event.issued_ns && event.issued_ns < event.landed_ns);
        assert!(event.ok && event.class == ReadClass::Demand && event.barrier == 0);
        bytes += event.bytes;
        device_bytes += event.device_bytes;
    }
    let counters = streamer.counters();
    assert_eq!(
        (bytes, device_bytes),
        (counters.expert_bytes_read, counters.device_bytes)
    );
    let drive = streamer.drive_counters().remove(0);
    assert_eq!((drive.reads, drive.in_flight), (counters.reads, 0));
    let end = batch.events.iter().map(|event| event.landed_ns).max();
    assert_eq!(
        Some(drive.busy_ns),
        end,
        "one read at least is in flight from 0 to the end"
    );
    assert!(streamer.events(batch.next()).events.is_empty());
}

#[test]
fn drives_run_side_by_side() {
    // Two drives hold one expert each, and each read takes 1000 ns: two reads in turn on each, 2 in flight.
    let world = World {
        files: vec![16 * 4096; 2],
        experts: vec![vec![(0, 0, 16 * 4096)], vec![(1, 0, 16 * 4096)]],
    };
    let layout = world.in_memory();
    let clock = Arc::new(VirtualClock::default());
    let mut backend = world.memory_backend(&layout, &clock);
    for nth in 0..8 {
        backend.inject(nth, Fault::Delay(1000));
    }
    let mut streamer = in_virtual_time(&layout, 2, 4 * PAGE_BYTES, backend, &clock);
    take_all(&mut streamer, &world, &[0, 1]);
    for drive in streamer.drive_counters() {
        assert_eq!((drive.reads, drive.busy_ns), (4, 2000));
    }
}

#[test]
fn stress_with_leases_on_other_threads() {
    let world = World::row(24, 150_000);
    let folder = tempfile::tempdir().unwrap();
    let layout = world.on_disk(folder.path());
    let mut streamer = on_threads(&layout, 5, 3 * PAGE_BYTES);
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 33) % below
    };
    std::thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::sync_channel::<drives::Landed>(1);
        let world = &world;
        scope.spawn(move || {
            for landed in receiver {
                world.check(&landed);
            }
        });
        for _ in 0..120 {
            let count = 1 + random(24) as usize;
            let first = random(24) as usize;
            let ids: Vec<_> = (0..count).map(|n| id((first + n) % 24)).collect();
            let barrier = streamer.demand(&ids).unwrap();
            let take = if random(3) == 0 {
                random(count as u64)
            } else {
                count as u64
            };
            for _ in 0..take {
                let landed = streamer.next(&barrier).unwrap().unwrap();
                if random(2) == 0 {
                    sender.send(landed).unwrap();
                }
            }
        }
    });
    let arena = streamer.arena();
    assert_eq!(streamer.counters().stray_completions, 0);
    drop(streamer);
    assert_eq!(arena.free_slots(), 5);
}

#[test]
fn the_memory_back_end_serves_a_thread_too() {
    let world = World::row(9, 30_000);
    let layout = world.in_memory();
    let clock = Arc::new(VirtualClock::default());
    let mut backend = world.memory_backend(&layout, &clock);
    for nth in 0..60 {
        backend.inject(nth, Fault::Delay(nth * 7919 % 100));
    }
    let slots = arena(&layout, 2);
    let options = StreamOptions {
        chunk_bytes: PAGE_BYTES,
        ..StreamOptions::default()
    };
    let mut streamer = Streamer::start(layout, slots, Box::new(backend), clock, &options).unwrap();
    for _ in 0..20 {
        take_all(&mut streamer, &world, &[8, 0, 7, 1, 6, 2, 5, 3, 4]);
    }
}

/// A back end with a bug.
struct Broken(drives::MemoryBackend);

impl Backend for Broken {
    fn depth(&self, drive: DriveId) -> usize {
        self.0.depth(drive)
    }

    fn submit(&mut self, read: ReadRequest) {
        self.0.submit(read);
    }

    fn wait(&mut self, _done: &mut Vec<Completion>) {
        panic!("this panic is part of a test");
    }

    fn waker(&self) -> std::task::Waker {
        self.0.waker()
    }
}

#[test]
fn a_dead_reader_is_an_error_and_not_a_deadlock() {
    let world = World::row(2, 10_000);
    let layout = world.in_memory();
    let clock = Arc::new(VirtualClock::default());
    let backend = Broken(world.memory_backend(&layout, &clock));
    let slots = arena(&layout, 2);
    let options = StreamOptions::default();
    let mut streamer = Streamer::start(layout, slots, Box::new(backend), clock, &options).unwrap();
    let barrier = streamer.demand(&world.ids()).unwrap();
    assert!(matches!(streamer.next(&barrier), Err(Error::Stopped)));
}
