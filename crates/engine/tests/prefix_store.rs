//! The prefix store: what it spares, what it holds, and what it never serves.

mod common;

use common::{Golden, assert_same, bits, fed, open, pass, plain_options};
use engine::{Cancel, Engine, Options, PREFIX_INTERVAL_TOKENS, PrefixLimits, PrefixStore, Sequence};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const TOKENS: usize = 40;

struct Rig {
    golden: Golden,
    engine: Engine,
    folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let golden = Golden::read("k3_b");
        Self {
            engine: open(&golden.dir, &plain_options()),
            golden,
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn ids(&self) -> Vec<u32> {
        self.golden.long_prompt[..TOKENS].to_vec()
    }

    fn store(&self, limits: PrefixLimits) -> PrefixStore {
        PrefixStore::open(self.folder.path(), &self.engine, limits).unwrap()
    }

    fn fed(&mut self, tokens: usize) -> Sequence {
        let ids = self.ids();
        let mut sequence = self.engine.new_sequence();
        pass(&mut self.engine, &mut sequence, &ids[..tokens]);
        sequence
    }

    /// Bytes of a state after `tokens` tokens.
    fn bytes(&mut self, tokens: usize) -> u64 {
        let sequence = self.fed(tokens);
        self.engine.session_bytes(&sequence, &[], &[]).unwrap()
    }
}

/// The states' files, by tokens.
fn states(store: &PrefixStore) -> Vec<(usize, PathBuf)> {
    let files = std::fs::read_dir(store.folder()).unwrap().map(|e| e.unwrap().path());
    let mut states: Vec<(usize, PathBuf)> = files
        .filter(|path| path.extension().is_some_and(|e| e == "state"))
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            (name.split_once('-').unwrap().0.parse().unwrap(), path)
        })
        .collect();
    states.sort();
    states
}

fn tokens_of(store: &PrefixStore) -> Vec<usize> {
    states(store).into_iter().map(|(tokens, _)| tokens).collect()
}

fn set_age(path: &Path, hours: u64) {
    let file = std::fs::File::options().append(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600))
        .unwrap();
}

#[test]
fn the_longest_beginning_is_restored_and_goes_on_with_the_same_bits() {
    let mut rig = Rig::new();
    let ids = rig.ids();
    let want = fed(&mut rig.engine, &ids, &[TOKENS]);
    let mut store = rig.store(PrefixLimits::default());
    assert!(store.find(&ids, 0).is_none());
    for tokens in [10, 25, TOKENS] {
        let sequence = rig.fed(tokens);
        assert!(store.keep(&rig.engine, &sequence));
        assert!(!store.keep(&rig.engine, &sequence), "it is there already");
    }
    // As another process would, with other threads.
    let options = Options {
        threads: 1,
        ..plain_options()
    };
    let mut engine = open(&rig.golden.dir, &options);
    let mut store = PrefixStore::open(rig.folder.path(), &engine, PrefixLimits::default()).unwrap();
    // All 40 would leave nothing to feed.
    let session = store.find(&ids, 0).unwrap();
    let mut sequence = store.restore(&engine, session).unwrap();
    assert_eq!(sequence.ids(), &ids[..25]);
    assert_eq!((store.stats().restored, store.stats().restored_tokens), (1, 25));
    let got = pass(&mut engine, &mut sequence, &ids[25..]);
    assert_same(
        &got,
        &want[25 * engine.config().vocab_size..],
        "after the stored prefix",
    );
    assert!(store.find(&ids, 25).is_none(), "nothing is longer");
    let mut other = ids.clone();
    other[20] ^= 1;
    assert_eq!(store.find(&other, 0).unwrap().ids().len(), 10);
    other[0] ^= 1;
    assert!(store.find(&other, 0).is_none());
    assert!(store.take_notices().is_empty());
}

#[test]
fn what_is_held_and_written_has_limits() {
    let mut rig = Rig::new();
    let one = rig.bytes(30);
    let limits = PrefixLimits {
        held: 3 * one,
        daily: 5 * one,
    };
    let mut store = rig.store(limits);
    for (n, tokens) in [30, 29, 28].into_iter().enumerate() {
        let sequence = rig.fed(tokens);
        assert!(store.keep(&rig.engine, &sequence));
        set_age(&states(&store)[0].1, 10 - n as u64);
    }
    // The oldest is used again, so the second goes.
    let ids = rig.ids();
    let session = store.find(&ids, 29).unwrap();
    assert!(store.restore(&rig.engine, session).is_some());
    let sequence = rig.fed(27);
    assert!(store.keep(&rig.engine, &sequence));
    assert_eq!(tokens_of(&store), [27, 28, 30]);
    assert_eq!(store.stats().evicted, 1);
    let sequence = rig.fed(26);
    assert!(store.keep(&rig.engine, &sequence));
    // The day's bytes are spent, for every process.
    let sequence = rig.fed(25);
    for store in [&mut store, &mut rig.store(limits)] {
        assert!(!store.keep(&rig.engine, &sequence));
        assert_eq!(store.stats().declined, 1);
        let notices = store.take_notices();
        assert!(notices[0].contains("a day; raise the limits"), "{notices:?}");
    }
    let held: u64 = states(&store)
        .iter()
        .map(|(_, path)| path.metadata().unwrap().len())
        .sum();
    assert!(held <= limits.held, "{held}");
    // Yesterday's bytes do not count.
    let account = store.folder().join("written");
    let text = std::fs::read_to_string(&account).unwrap();
    let (day, bytes) = text.trim().split_once(' ').unwrap();
    assert!(bytes.trim().parse::<u64>().unwrap() <= limits.daily);
    let yesterday = day.parse::<u64>().unwrap() - 1;
    std::fs::write(&account, format!("{yesterday:>20} {:>20}\n", bytes.trim())).unwrap();
    assert!(store.keep(&rig.engine, &sequence));
    // One that is larger than all that may be held is never written.
    let mut small = rig.store(PrefixLimits {
        held: one / 2,
        ..limits
    });
    let sequence = rig.fed(24);
    assert!(!small.keep(&rig.engine, &sequence));
}

#[test]
fn a_damaged_state_is_dropped_and_the_next_one_served() {
    let mut rig = Rig::new();
    let mut store = rig.store(PrefixLimits::default());
    let ids = rig.ids();
    for tokens in [5, 20, 30] {
        let sequence = rig.fed(tokens);
        store.keep(&rig.engine, &sequence);
    }
    let files = states(&store);
    let flip = |path: &Path, at: usize| {
        let mut bytes = std::fs::read(path).unwrap();
        let at = at.min(bytes.len() - 1);
        bytes[at] ^= 4;
        std::fs::write(path, bytes).unwrap();
    };
    flip(&files[2].1, usize::MAX);
    flip(&files[1].1, 70);
    let session = store.find(&ids, 0).unwrap();
    assert_eq!(session.ids().len(), 30, "damage in the last layer is not seen yet");
    assert!(store.restore(&rig.engine, session).is_none());
    let session = store.find(&ids, 0).unwrap();
    assert_eq!(store.restore(&rig.engine, session).unwrap().ids(), &ids[..5]);
    assert_eq!(tokens_of(&store), [5]);
    let notices = store.take_notices();
    assert_eq!(notices.len(), 2);
    assert!(
        notices.iter().all(|n| n.contains("dropped") && n.contains("damaged")),
        "{notices:?}"
    );
}

#[test]
fn a_long_prompt_leaves_states_at_intervals() {
    let mut rig = Rig::new();
    let options = Options {
        positions: 2 * PREFIX_INTERVAL_TOKENS + 100,
        pass_rows: 500,
        ..plain_options()
    };
    rig.engine = open(&rig.golden.dir, &options);
    let rows = rig.engine.plan().pass_rows;
    let step = PREFIX_INTERVAL_TOKENS / rows * rows;
    let ids: Vec<u32> = rig
        .golden
        .long_prompt
        .iter()
        .cycle()
        .take(2 * step + 9)
        .copied()
        .collect();
    let mut store = rig.store(PrefixLimits::default());
    let mut sequence = rig.engine.new_sequence();
    let mut shares = vec![];
    let no = Cancel::default();
    let fed = store
        .feed(&mut rig.engine, &mut sequence, &ids, &no, &mut |p| {
            shares.push((p.share, p.of))
        })
        .unwrap();
    assert_eq!((fed, sequence.ids()), (2 * step, &ids[..2 * step]));
    assert_eq!(tokens_of(&store), [step, 2 * step]);
    assert!(shares.is_sorted() && shares.iter().all(|(share, of)| *share <= 1.0 && *of == ids.len()));
    let want = bits(
        rig.engine
            .prefill(&mut sequence, &ids[fed..], &no, &mut |_| ())
            .unwrap(),
    );
    let session = store.find(&ids, 0).unwrap();
    let mut again = store.restore(&rig.engine, session).unwrap();
    let rest = &ids[again.ids().len()..];
    assert_eq!(rest.len(), 9);
    let got = bits(rig.engine.prefill(&mut again, rest, &no, &mut |_| ()).unwrap());
    assert_same(&got, &want, "after the stored prefix");
}

/// Two processes at once, as far as files and locks are concerned: each has its own handles.
#[test]
fn two_at_once_do_no_harm() {
    let rig = Rig::new();
    let (ids, folder, dir) = (rig.ids(), rig.folder.path(), &rig.golden.dir);
    let one = {
        let mut rig = Rig::new();
        rig.bytes(TOKENS)
    };
    // Room for four, so that each removes what the other may want.
    let limits = PrefixLimits {
        held: 4 * one,
        daily: 1 << 40,
    };
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let ids = &ids;
            scope.spawn(move || {
                let mut engine = open(dir, &plain_options());
                let mut store = PrefixStore::open(folder, &engine, limits).unwrap();
                let mut sequence = engine.new_sequence();
                for round in 0..60usize {
                    let at = 1 + (round * 7 + worker * 3) % (TOKENS - 2);
                    let found = store.find(&ids[..at + 1], 0);
                    let found = found.and_then(|session| store.restore(&engine, session));
                    sequence = found.unwrap_or_else(|| engine.new_sequence());
                    assert!(ids.starts_with(sequence.ids()));
                    let rest = &ids[sequence.ids().len()..at];
                    if !rest.is_empty() {
                        pass(&mut engine, &mut sequence, rest);
                    }
                    store.keep(&engine, &sequence);
                }
                assert!(store.stats().kept > 0);
                assert_eq!(store.take_notices(), [] as [String; 0], "nothing was ever damaged");
                drop(sequence);
            });
        }
    });
    let mut store = rig.store(limits);
    let held: u64 = states(&store)
        .iter()
        .map(|(_, path)| path.metadata().unwrap().len())
        .sum();
    assert!(held <= limits.held, "{held}");
    let session = store.find(&ids, 0).unwrap();
    assert!(store.restore(&rig.engine, session).is_some());
}
