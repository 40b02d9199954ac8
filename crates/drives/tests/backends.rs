//! What every back end promises, tried on each of them: threads, io_uring, memory.

mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{World, arena, byte, id};
#[cfg(target_os = "linux")]
use drives::UringBackend;
use drives::{
    Arena, Backend, Error, Layout, LayoutBuilder, MonotonicClock, Notices, PAGE_BYTES, RawLanding, RawReads, Source,
    StreamOptions, Streamer, ThreadBackend, VirtualClock, open_best,
};

const KINDS: [Kind; 3] = [Kind::Threads, Kind::Uring, Kind::Memory];
const ON_DISK: [Kind; 2] = [Kind::Threads, Kind::Uring];
const EIO: i32 = 5;
const DEPTH: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Threads,
    Uring,
    Memory,
}

/// A back end on files of a layout; `None`, with a message, where the system refuses it.
fn on_files(kind: Kind, layout: &Arc<Layout>, arena: &Arc<Arena>, notices: &Notices) -> Option<Box<dyn Backend>> {
    let clock = Arc::new(MonotonicClock::new());
    match kind {
        Kind::Threads => Some(Box::new(ThreadBackend::open(layout, DEPTH, clock, notices).unwrap())),
        #[cfg(target_os = "linux")]
        Kind::Uring => match UringBackend::open(layout, arena, &[DEPTH], clock, notices) {
            Ok(backend) => Some(Box::new(backend)),
            Err(error @ Error::Uring { .. }) => {
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        },
        #[cfg(not(target_os = "linux"))]
        Kind::Uring => {
            let _ = arena;
            eprintln!("skipped: io_uring is Linux's");
            None
        }
        Kind::Memory => panic!("the memory back end has no files"),
    }
}

/// A world served by a back end, with an arena of `slots` slots of `slot_bytes`.
fn serve(kind: Kind, world: &World, folder: &Path, slots: usize, slot_bytes: usize) -> Option<RawReads> {
    let arena = Arena::new(slots * slot_bytes, slot_bytes).unwrap();
    let (layout, backend): (_, Box<dyn Backend>) = if kind == Kind::Memory {
        let layout = world.in_memory();
        let backend = world.memory_backend(&layout, &Arc::new(VirtualClock::default()));
        (layout, Box::new(backend))
    } else {
        let layout = world.on_disk(folder);
        let backend = on_files(kind, &layout, &arena, &Notices::default())?;
        (layout, backend)
    };
    Some(RawReads::new(backend, layout, arena))
}

fn each(kinds: &[Kind], mut test: impl FnMut(Kind, &Path)) {
    for &kind in kinds {
        let folder = tempfile::tempdir().unwrap();
        test(kind, folder.path());
    }
}

fn finish(reads: &mut RawReads) -> Vec<RawLanding> {
    let mut landed = Vec::new();
    while reads.in_flight() > 0 {
        reads.wait(&mut landed);
    }
    landed
}

fn check(landing: &RawLanding) {
    let lease = landing.outcome.as_ref().unwrap();
    let bytes = lease.extent(0);
    assert_eq!(bytes.len(), landing.wanted);
    let file = landing.file.index();
    let wrong = (0..bytes.len()).find(|&at| bytes[at] != byte(file, landing.offset + at as u64));
    assert_eq!(wrong, None, "{} bytes at {}", landing.wanted, landing.offset);
}

/// The ids of a world's files, in order.
fn files(reads_of: &World, layout: &Layout) -> Vec<drives::FileId> {
    (0..reads_of.files.len())
        .map(|file| layout.homes(id(file), 0).unwrap()[0].file)
        .collect()
}

/// A world with one expert for each file, so that the layout knows them.
fn world_of(lens: &[u64]) -> World {
    World {
        files: lens.to_vec(),
        experts: lens
            .iter()
            .enumerate()
            .map(|(file, &len)| vec![(file, 0, len)])
            .collect(),
    }
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 20) % end
    }
}

#[test]
fn bytes_are_right_wherever_and_however_much_is_read() {
    let lens = [9 << 20, 3 * PAGE_BYTES as u64 + 1, 700_001, 5];
    let world = world_of(&lens);
    each(&KINDS, |kind, folder| {
        let Some(mut reads) = serve(kind, &world, folder, 24, 6 << 20) else {
            return;
        };
        let files = files(&world, &reads.layout());
        let mut dice = Dice(7);
        let mut asked = BTreeMap::new();
        let mut landed = Vec::new();
        while asked.values().sum::<u32>() < 400 {
            let file = dice.below(4) as usize;
            let offset = dice.below(lens[file]) / PAGE_BYTES as u64 * PAGE_BYTES as u64;
            let most = (lens[file] - offset).min(match dice.below(8) {
                0 => 6 << 20,
                1..5 => 100_000,
                _ => 4096,
            });
            let wanted = 1 + dice.below(most) as usize;
            if reads.start(files[file], offset, wanted) {
                *asked.entry((file, offset, wanted)).or_default() += 1;
            } else {
                reads.wait(&mut landed);
                for landing in landed.drain(..) {
                    check(&landing);
                    let key = (landing.file.index(), landing.offset, landing.wanted);
                    *asked.get_mut(&key).unwrap() -= 1;
                    *asked.entry((9, 0, 0)).or_default() += 1;
                }
            }
        }
        for landing in finish(&mut reads) {
            check(&landing);
            *asked
                .get_mut(&(landing.file.index(), landing.offset, landing.wanted))
                .unwrap() -= 1;
        }
        asked.remove(&(9, 0, 0));
        assert!(
            asked.values().all(|&left| left == 0),
            "{kind:?}: every read is answered once"
        );
        assert_eq!(reads.strays(), 0);
    });
}

#[test]
fn the_last_page_may_be_asked_for_in_part_or_to_its_end() {
    let len = 2 * PAGE_BYTES as u64 + 100;
    let world = world_of(&[len]);
    each(&KINDS, |kind, folder| {
        let Some(mut reads) = serve(kind, &world, folder, 4, 4 * PAGE_BYTES) else {
            return;
        };
        let file = files(&world, &reads.layout())[0];
        for (offset, wanted) in [
            (0, len),
            (PAGE_BYTES as u64, 4196),
            (2 * PAGE_BYTES as u64, 100),
            (0, 8200),
        ] {
            assert!(reads.start(file, offset, wanted as usize));
        }
        let landed = finish(&mut reads);
        assert_eq!(landed.len(), 4, "{kind:?}");
        landed.iter().for_each(check);
    });
}

#[test]
fn many_more_reads_than_the_kernel_takes_at_once_are_all_answered() {
    let world = world_of(&[1 << 20]);
    each(&KINDS, |kind, folder| {
        let Some(mut reads) = serve(kind, &world, folder, 1500, PAGE_BYTES) else {
            return;
        };
        let file = files(&world, &reads.layout())[0];
        for read in 0..1500 {
            assert!(reads.start(file, read % 256 * PAGE_BYTES as u64, PAGE_BYTES));
        }
        assert!(!reads.start(file, 0, 1), "no slot is left");
        let landed = finish(&mut reads);
        assert_eq!(landed.len(), 1500, "{kind:?}");
        landed.iter().for_each(check);
    });
}

#[test]
fn a_file_that_ends_early_is_an_error_with_numbers_and_spares_the_others() {
    let len = 8 * PAGE_BYTES as u64;
    let world = world_of(&[len, len]);
    each(&ON_DISK, |kind, folder| {
        let Some(mut reads) = serve(kind, &world, folder, 4, 8 * PAGE_BYTES) else {
            return;
        };
        let files = files(&world, &reads.layout());
        let path = folder.join("shard-0");
        File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
        for (file, offset, wanted) in [(0, 0, len), (0, 2 * PAGE_BYTES as u64, 1), (1, 0, len)] {
            assert!(reads.start(files[file], offset, wanted as usize));
        }
        let landed = finish(&mut reads);
        assert_eq!(landed.len(), 3);
        for landing in landed {
            match landing.outcome {
                Ok(_) => check(&landing),
                Err(error) => {
                    let expected = if landing.offset == 0 { 5000 } else { 0 };
                    assert_eq!(error.got, expected, "{kind:?}");
                    assert_eq!((error.path, error.errno), (path.clone(), None));
                    assert_eq!((error.offset, error.wanted), (landing.offset, landing.wanted as u64));
                }
            }
        }
    });
}

/// A layout of one real expert and one more file, for files that no expert could be in.
#[cfg(target_os = "linux")]
fn with_file(folder: &Path, path: &str) -> (Arc<Layout>, drives::FileId) {
    let shard = folder.join("shard");
    std::fs::write(&shard, [1]).unwrap();
    let mut builder = LayoutBuilder::new();
    let file = builder.file(&shard).unwrap();
    let source = Source {
        file,
        offset: 0,
        len: 1,
    };
    builder.expert(id(0), &[source]).unwrap();
    let other = builder.file(Path::new(path)).unwrap();
    (Arc::new(builder.build().unwrap()), other)
}

#[cfg(target_os = "linux")]
#[test]
fn a_device_error_names_the_file_and_the_errno() {
    // The memory of a process has no page 0: reading there is EIO.
    let memory = "/proc/self/mem";
    each(&ON_DISK, |kind, folder| {
        let (layout, file) = with_file(folder, memory);
        let arena = Arena::new(1 << 20, 1 << 16).unwrap();
        let Some(backend) = on_files(kind, &layout, &arena, &Notices::default()) else {
            return;
        };
        let mut reads = RawReads::new(backend, layout, arena);
        assert!(reads.start(file, 0, 100));
        let error = finish(&mut reads).remove(0).outcome.unwrap_err();
        assert_eq!((error.errno, error.got), (Some(EIO), 0), "{kind:?}");
        assert_eq!(error.path, Path::new(memory));
        assert!(error.to_string().contains("os error 5"), "{error}");
    });
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_system_without_direct_reads_is_read_through_the_cache_with_a_notice() {
    each(&ON_DISK, |kind, folder| {
        let (layout, file) = with_file(folder, "/proc/version");
        let notices = Notices::default();
        let arena = Arena::new(1 << 20, 1 << 16).unwrap();
        let Some(backend) = on_files(kind, &layout, &arena, &notices) else {
            return;
        };
        let mut reads = RawReads::new(backend, layout, arena);
        assert!(reads.start(file, 0, 5));
        let landing = finish(&mut reads).remove(0);
        assert_eq!(landing.outcome.unwrap().extent(0), b"Linux", "{kind:?}");
        let texts: Vec<String> = notices.take().iter().map(ToString::to_string).collect();
        let told = texts
            .iter()
            .any(|text| text.starts_with("/proc: direct reads are refused"));
        assert!(told, "{kind:?}: {texts:?}");
    });
}

#[test]
fn the_waker_ends_a_wait_of_now_and_of_later() {
    let world = world_of(&[PAGE_BYTES as u64]);
    each(&KINDS, |kind, folder| {
        let Some(mut reads) = serve(kind, &world, folder, 1, PAGE_BYTES) else {
            return;
        };
        let mut landed = Vec::new();
        let waker = reads.waker();
        for _ in 0..3 {
            waker.wake_by_ref();
            waker.wake_by_ref();
            reads.wait(&mut landed);
        }
        for _ in 0..3 {
            let other = waker.clone();
            let start = Instant::now();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                other.wake();
            });
            // A wake may also end the wait after the one that it was for; then that one has waited.
            while start.elapsed() < Duration::from_millis(30) {
                reads.wait(&mut landed);
            }
            thread.join().unwrap();
        }
        assert!(landed.is_empty(), "{kind:?}");
        let file = files(&world, &reads.layout())[0];
        assert!(reads.start(file, 0, 1));
        finish(&mut reads).iter().for_each(check);
    });
}

/// Processor time of this thread.
#[cfg(target_os = "linux")]
fn thread_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(target_os = "linux")]
#[test]
fn waiting_takes_no_processor_time() {
    let world = world_of(&[PAGE_BYTES as u64]);
    each(&KINDS, |kind, folder| {
        let Some(mut reads) = serve(kind, &world, folder, 1, PAGE_BYTES) else {
            return;
        };
        let waker = reads.waker();
        let alarm = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            waker.wake();
        });
        let (start, before) = (Instant::now(), thread_time());
        reads.wait(&mut Vec::new());
        let (waited, used) = (start.elapsed(), thread_time() - before);
        alarm.join().unwrap();
        assert!(waited >= Duration::from_millis(190), "{kind:?} waited {waited:?}");
        assert!(used < Duration::from_millis(5), "{kind:?} used {used:?}");
    });
}

#[test]
fn a_dropped_back_end_writes_nothing_any_more() {
    let world = world_of(&[24 << 20]);
    each(&KINDS, |kind, folder| {
        for started in [false, true] {
            let Some(mut reads) = serve(kind, &world, folder, 12, 2 << 20) else {
                return;
            };
            let file = files(&world, &reads.layout())[0];
            let arena = reads.arena();
            for read in 0..12 {
                assert!(reads.start(file, read * (2 << 20), 2 << 20));
            }
            if started {
                reads.wait(&mut Vec::new());
            }
            drop(reads);
            // SAFETY: the arena is mapped as long as it lives, and nobody reads into it any more: that is what is tested.
            let memory = unsafe { std::slice::from_raw_parts(arena.as_ptr(), arena.bytes()) };
            let left = memory.to_vec();
            std::thread::sleep(Duration::from_millis(20));
            assert!(memory == left, "{kind:?}");
        }
    });
}

/// Pages of a file in the page cache.
#[cfg(target_os = "linux")]
fn cached_pages(file: &File) -> usize {
    let len = file.metadata().unwrap().len() as usize;
    // SAFETY: the file is the test's own and does not shrink while the map lives.
    let map = unsafe { memmap2::Mmap::map(file) }.unwrap();
    let mut pages = vec![0u8; len.div_ceil(PAGE_BYTES)];
    // SAFETY: the range is mapped, and `pages` has one byte for each of its pages.
    let status = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), len, pages.as_mut_ptr()) };
    assert_eq!(status, 0);
    pages.iter().filter(|&&page| page & 1 == 1).count()
}

#[cfg(target_os = "linux")]
#[test]
fn no_page_stays_in_the_cache() {
    let world = world_of(&[5 << 20]);
    each(&ON_DISK, |kind, folder| {
        let Some(mut reads) = serve(kind, &world, folder, 5, 1 << 20) else {
            return;
        };
        let file = File::open(folder.join("shard-0")).unwrap();
        assert!(
            cached_pages(&file) > 0,
            "the measure itself: a written file leaves pages"
        );
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        if cached_pages(&file) > 0 {
            eprintln!("skipped: the temporary folder is itself the page cache");
            return;
        }
        let shard = files(&world, &reads.layout())[0];
        for read in 0..5 {
            assert!(reads.start(shard, read << 20, 1 << 20));
        }
        let landed = finish(&mut reads);
        assert_eq!(landed.len(), 5);
        landed.iter().for_each(check);
        assert_eq!(cached_pages(&file), 0, "{kind:?}");
    });
}

#[test]
fn reads_into_memory_that_is_not_registered_are_right_too() {
    let world = world_of(&[1 << 20]);
    each(&ON_DISK, |kind, folder| {
        let layout = world.on_disk(folder);
        let (known, other) = (arena(&layout, 1), arena(&layout, 4));
        let Some(backend) = on_files(kind, &layout, &known, &Notices::default()) else {
            return;
        };
        let mut reads = RawReads::new(backend, Arc::clone(&layout), other);
        let file = files(&world, &layout)[0];
        for _ in 0..4 {
            assert!(reads.start(file, 0, 1 << 20));
        }
        finish(&mut reads).iter().for_each(check);
    });
}

#[test]
fn the_best_back_end_is_io_uring_where_it_works() {
    let folder = tempfile::tempdir().unwrap();
    let world = world_of(&[100_000]);
    let layout = world.on_disk(folder.path());
    let (arena, notices) = (arena(&layout, 2), Notices::default());
    let works = on_files(Kind::Uring, &layout, &arena, &notices).is_some();
    let clock = Arc::new(MonotonicClock::new());
    let best = open_best(&layout, &arena, &[3], clock, &notices).unwrap();
    assert_eq!(best.describe().starts_with("io_uring"), works);
    let drive = layout.drive_ids().next().unwrap();
    assert_eq!(best.depth(drive), 3);
    let mut reads = RawReads::new(best, Arc::clone(&layout), arena);
    assert!(reads.start(files(&world, &layout)[0], 0, 100_000));
    finish(&mut reads).iter().for_each(check);
}

#[test]
fn streams_are_the_same_through_any_back_end() {
    let world = World::row(40, 300_000);
    each(&ON_DISK, |kind, folder| {
        let layout = world.on_disk(folder);
        let arena = arena(&layout, 5);
        let Some(backend) = on_files(kind, &layout, &arena, &Notices::default()) else {
            return;
        };
        let clock = Arc::new(MonotonicClock::new());
        let options = StreamOptions {
            chunk_bytes: 16 * PAGE_BYTES,
            ..StreamOptions::default()
        };
        let mut streamer = Streamer::start(layout, Arc::clone(&arena), backend, clock, &options).unwrap();
        for round in 0..4 {
            let barrier = streamer.demand(&world.ids()).unwrap();
            let mut left = if round == 2 { 7 } else { usize::MAX };
            while left > 0
                && let Some(landed) = streamer.next(&barrier).unwrap()
            {
                world.check(&landed);
                left -= 1;
            }
        }
        assert_eq!(streamer.counters().stray_completions, 0, "{kind:?}");
        drop(streamer);
        assert_eq!(arena.free_slots(), 5, "{kind:?}");
    });
}

/// What happens where the kernel or an administrator says no.
#[cfg(target_os = "linux")]
mod refused {
    use super::*;
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    const EPERM: i32 = 1;

    /// Lets system call `number` fail with EPERM on this thread and those that it starts, for good, as containers do.
    fn forbid(number: libc::c_long) {
        let step = |code: u32, yes, no, k| libc::sock_filter {
            code: code as u16,
            jt: yes,
            jf: no,
            k,
        };
        let mut steps = [
            // The number is the first word of what the filter sees.
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number as u32),
            step(
                libc::BPF_RET | libc::BPF_K,
                0,
                0,
                libc::SECCOMP_RET_ERRNO | EPERM as u32,
            ),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog {
            len: steps.len() as u16,
            filter: steps.as_mut_ptr(),
        };
        // SAFETY: plain numbers; it changes this thread only.
        let fixed = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        assert_eq!(fixed, 0);
        // SAFETY: `program` and its steps live until the call has copied them.
        let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }

    fn on_a_thread(test: impl FnOnce() + Send + 'static) {
        std::thread::spawn(test).join().unwrap();
    }

    #[test]
    fn threads_take_over_where_io_uring_is_forbidden() {
        on_a_thread(|| {
            forbid(libc::SYS_io_uring_setup);
            let folder = tempfile::tempdir().unwrap();
            let world = world_of(&[100_000]);
            let layout = world.on_disk(folder.path());
            let (arena, notices) = (arena(&layout, 2), Notices::default());
            let clock = Arc::new(MonotonicClock::new());
            let error = UringBackend::open(&layout, &arena, &[], clock.clone(), &notices)
                .err()
                .unwrap();
            assert!(
                matches!(&error, Error::Uring { reason } if reason.contains("os error 1")),
                "{error}"
            );
            let backend = open_best(&layout, &arena, &[3], clock, &notices).unwrap();
            assert_eq!(backend.describe(), "positional reads on 3 threads");
            let text = notices.take().pop().unwrap().to_string();
            assert!(
                text.starts_with("io_uring is refused (Operation not permitted"),
                "{text}"
            );
            let mut reads = RawReads::new(backend, Arc::clone(&layout), arena);
            assert!(reads.start(files(&world, &layout)[0], 0, 100_000));
            finish(&mut reads).iter().for_each(check);
        });
    }

    #[test]
    fn reads_fail_and_nothing_hangs_when_io_uring_is_forbidden_later() {
        on_a_thread(|| {
            let folder = tempfile::tempdir().unwrap();
            let world = world_of(&[1 << 20]);
            let Some(mut reads) = serve(Kind::Uring, &world, folder.path(), 400, 16 * PAGE_BYTES) else {
                return;
            };
            let file = files(&world, &reads.layout())[0];
            let start = |reads: &mut RawReads, count: u64| {
                for read in 0..count {
                    let page = read * 16 % 256;
                    assert!(reads.start(file, page * PAGE_BYTES as u64, 16 * PAGE_BYTES));
                }
            };
            start(&mut reads, 100);
            let mut landed = Vec::new();
            reads.wait(&mut landed);
            forbid(libc::SYS_io_uring_enter);
            // The kernel had taken all of them, so all of them land.
            landed.append(&mut finish(&mut reads));
            assert_eq!(landed.len(), 100);
            landed.drain(..).for_each(|landing| check(&landing));
            for round in 0..2 {
                start(&mut reads, 400);
                let landed = finish(&mut reads);
                assert_eq!(landed.len(), 400, "round {round}");
                for landing in landed {
                    assert_eq!(landing.outcome.unwrap_err().errno, Some(EPERM));
                }
            }
            let waker = reads.waker();
            waker.wake_by_ref();
            reads.wait(&mut Vec::new());
            assert!(reads.start(file, 0, 10));
            drop(reads);
        });
    }

    #[test]
    fn memory_that_cannot_be_locked_is_read_into_unregistered() {
        on_a_thread(|| {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let slot = 1 << 20;
            if limit.is_none_or(|limit| limit > 256 << 20) {
                eprintln!("skipped: locked memory is not limited here");
                return;
            }
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::IPC_LOCK);
            set_capabilities(None, sets).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let world = world_of(&[3 << 20]);
            let layout = world.on_disk(folder.path());
            let slots = limit.unwrap_or(0) as usize / slot + 4;
            let (arena, notices) = (Arena::new(slots * slot, slot).unwrap(), Notices::default());
            let Some(backend) = on_files(Kind::Uring, &layout, &arena, &notices) else {
                return;
            };
            assert_eq!(backend.describe(), "io_uring");
            let text = notices.take().pop().unwrap().to_string();
            assert!(text.starts_with("the kernel cannot register"), "{text}");
            assert!(text.contains("ulimit -l"), "{text}");
            let mut reads = RawReads::new(backend, Arc::clone(&layout), arena);
            for read in 0..3 {
                assert!(reads.start(files(&world, &layout)[0], read << 20, slot));
            }
            finish(&mut reads).iter().for_each(check);
        });
    }
}
