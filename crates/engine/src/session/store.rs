//! States of beginnings that may come again, in a folder: a request pays only for what follows the longest one.

use super::{Session, SessionError};
use crate::engine::Engine;
use crate::error::Error;
use crate::generate::{Cancel, PromptProgress};
use crate::sequence::Sequence;
use crate::trunk::TrunkFormat;
use kernels::NUMERICS_VERSION;
use std::fs::{DirEntry, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Bytes that a store holds at most, unless it is told otherwise: some 30 states of K3.
pub const PREFIX_HELD_BYTES: u64 = 16 << 30;
/// Bytes that are written to a store in a day at most, unless it is told otherwise: 140 states of K3. A drive of 4 TB that is made
/// for 600 full writes takes as much for 95 years.
pub const PREFIX_DAILY_BYTES: u64 = 64 << 30;
/// Tokens of a prompt between two states that are kept, as near as whole passes allow.
pub const PREFIX_INTERVAL_TOKENS: usize = 2048;

const DAY_S: u64 = 24 * 60 * 60;
const ENTRY_SUFFIX: &str = ".state";
/// Locked by whoever writes or removes; holds the day and the bytes written in it.
const ACCOUNT: &str = "written";
const ACCOUNT_BYTES: usize = 42;

/// Bounds of a store, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixLimits {
    /// Held at most.
    pub held: u64,
    /// Written in a day (UTC) at most, by all processes together.
    pub daily: u64,
}

impl Default for PrefixLimits {
    fn default() -> Self {
        Self {
            held: PREFIX_HELD_BYTES,
            daily: PREFIX_DAILY_BYTES,
        }
    }
}

/// What a store did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// States restored.
    pub restored: u64,
    /// Their tokens.
    pub restored_tokens: u64,
    /// States written.
    pub kept: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// States removed to make room.
    pub evicted: u64,
    /// States not written because of a limit.
    pub declined: u64,
}

/// A folder of states of one model, as session files. Several processes may use it at once.
#[derive(Debug)]
pub struct PrefixStore {
    folder: PathBuf,
    limits: PrefixLimits,
    stats: PrefixStats,
    notices: Vec<String>,
}

/// A state in the folder, by its name.
struct Entry {
    path: PathBuf,
    tokens: usize,
    crc: u32,
}

impl PrefixStore {
    /// Opens the part of `folder` that belongs to the engine's model and settings, and makes it if it is not there.
    ///
    /// # Errors
    ///
    /// [`Error::Session`] when the folder cannot be made.
    pub fn open(folder: &Path, engine: &Engine, limits: PrefixLimits) -> Result<Self, Error> {
        let trunk = match engine.trunk() {
            TrunkFormat::Bf16 => String::new(),
            converted => format!("-trunk-{converted}"),
        };
        let name = format!(
            "{}-{}-{:08x}-n{NUMERICS_VERSION}{trunk}",
            engine.identity()?,
            engine.plan().kv,
            engine.mla_eps().to_bits(),
        );
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).map_err(|error| SessionError::io(&folder, "create", error))?;
        Ok(Self {
            folder,
            limits,
            stats: PrefixStats::default(),
            notices: vec![],
        })
    }

    /// Where the states are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What was done so far.
    pub fn stats(&self) -> PrefixStats {
        self.stats
    }

    /// What the user should know, since the last call. Trouble with the store stops nobody.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// The longest state of a beginning of `ids` that is longer than `beyond` tokens and leaves at least one to feed. A
    /// damaged one is removed.
    pub fn find(&mut self, ids: &[u32], beyond: usize) -> Option<Session> {
        let mut entries = self.entries();
        entries.retain(|entry| entry.tokens > beyond && entry.tokens < ids.len());
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.tokens));
        for entry in entries {
            let beginning = &ids[..entry.tokens];
            if entry.crc != crc_of(beginning) {
                continue;
            }
            match Session::open(&entry.path) {
                Ok(session) if session.ids() == beginning => return Some(session),
                // Another text with the same checksum.
                Ok(_) => {}
                Err(error) => self.drop_damaged(&entry.path, &error.into()),
            }
        }
        None
    }

    /// The sequence of a state that [`find`](Self::find) found; `None` when it proves damaged, and then it is removed.
    pub fn restore(&mut self, engine: &Engine, session: Session) -> Option<Sequence> {
        let path = session.path().to_path_buf();
        match engine.restore(session) {
            Ok(sequence) => {
                touch(&path);
                self.stats.restored += 1;
                self.stats.restored_tokens += sequence.ids().len() as u64;
                Some(sequence)
            }
            Err(error) => {
                self.drop_damaged(&path, &error);
                None
            }
        }
    }

    /// Writes the state of `sequence`, unless it is there already or a limit forbids it; makes room by removing what
    /// has not been used for longest. Whether it was written.
    pub fn keep(&mut self, engine: &Engine, sequence: &Sequence) -> bool {
        if sequence.is_spoilt() || sequence.ids().is_empty() {
            return false;
        }
        match self.try_keep(engine, sequence) {
            Ok(written) => written,
            Err(error) => {
                self.notices.push(format!("the state was not kept: {error}"));
                false
            }
        }
    }

    fn try_keep(&mut self, engine: &Engine, sequence: &Sequence) -> Result<bool, Error> {
        let ids = sequence.ids();
        let name = format!("{}-{:08x}{ENTRY_SUFFIX}", ids.len(), crc_of(ids));
        let path = self.folder.join(name);
        if touch(&path) {
            return Ok(false);
        }
        let bytes = engine.session_bytes(sequence, &[], &[])?;
        let account = self.folder.join(ACCOUNT);
        let failed = |error| SessionError::io(&account, "use", error);
        // Held until the state is written, so that the limits hold for all processes together.
        let locked = Account::lock(&account).map_err(failed)?;
        let written = locked.today().map_err(failed)?.saturating_add(bytes);
        if bytes > self.limits.held || written > self.limits.daily {
            self.stats.declined += 1;
            if self.stats.declined == 1 {
                self.notices.push(format!(
                    "{}: states are not kept: found {bytes} bytes for one and {written} written today with it, expected at most {} held and {} \
                     a day; raise the limits of the prefix store, or leave it",
                    self.folder.display(),
                    self.limits.held,
                    self.limits.daily
                ));
            }
            return Ok(false);
        }
        self.make_room(bytes)
            .map_err(|error| SessionError::io(&self.folder, "make room in", error))?;
        // Counted first: a process that is killed must not get its bytes for nothing.
        locked.set_today(written).map_err(failed)?;
        engine.save(sequence, &[], &[], &path)?;
        self.stats.kept += 1;
        self.stats.kept_bytes += bytes;
        Ok(true)
    }

    /// Feeds most of a prompt, and keeps the state every [`PREFIX_INTERVAL_TOKENS`]. Returns how many of `ids` were fed; at
    /// least one is left for the pass that gives the first logits.
    ///
    /// # Errors
    ///
    /// Those of [`Engine::prefill`].
    pub fn feed(
        &mut self,
        engine: &mut Engine,
        sequence: &mut Sequence,
        ids: &[u32],
        cancel: &Cancel,
        progress: &mut dyn FnMut(PromptProgress),
    ) -> Result<usize, Error> {
        let rows = engine.plan().pass_rows;
        // Whole passes: a shorter one would read as many experts for fewer tokens.
        let step = (PREFIX_INTERVAL_TOKENS / rows).max(1) * rows;
        let mut fed = 0;
        while ids.len() - fed > step {
            engine.prefill(sequence, &ids[fed..fed + step], cancel, &mut |part| {
                progress(PromptProgress {
                    done: fed + part.done,
                    of: ids.len(),
                    share: (fed as f64 + part.share * step as f64) / ids.len() as f64,
                });
            })?;
            fed += step;
            self.keep(engine, sequence);
        }
        Ok(fed)
    }

    fn drop_damaged(&mut self, path: &Path, error: &Error) {
        // Removed by another process in the meantime.
        if !path.exists() {
            return;
        }
        match error {
            Error::Session(SessionError::Io { .. }) => {
                self.notices.push(format!("a kept state was passed over: {error}"))
            }
            _ => {
                let _ = std::fs::remove_file(path);
                self.notices.push(format!("a kept state was dropped: {error}"));
            }
        }
    }

    fn files(&self) -> impl Iterator<Item = DirEntry> {
        std::fs::read_dir(&self.folder).into_iter().flatten().flatten()
    }

    fn entries(&self) -> Vec<Entry> {
        let parse = |file: DirEntry| {
            let name = file.file_name().into_string().ok()?;
            let (tokens, crc) = name.strip_suffix(ENTRY_SUFFIX)?.split_once('-')?;
            Some(Entry {
                path: file.path(),
                tokens: tokens.parse().ok()?,
                crc: u32::from_str_radix(crc, 16).ok()?,
            })
        };
        self.files().filter_map(parse).collect()
    }

    /// Removes states, the least recently used first, until `bytes` more may be held; and what killed processes left.
    fn make_room(&mut self, bytes: u64) -> io::Result<()> {
        let mut states = vec![];
        for file in self.files() {
            let (path, about) = (file.path(), file.metadata());
            // Gone already, which is as good.
            let Ok(about) = about else { continue };
            let name = file.file_name();
            let name = name.to_string_lossy();
            if name.ends_with(super::atomic::PARTIAL_SUFFIX) {
                // Nobody writes while the account is locked.
                std::fs::remove_file(path)?;
            } else if name.ends_with(ENTRY_SUFFIX) {
                states.push((about.modified()?, about.len(), path));
            }
        }
        states.sort();
        let mut held: u64 = states.iter().map(|(_, len, _)| len).sum();
        for (_, len, path) in states {
            if held.saturating_add(bytes) <= self.limits.held {
                break;
            }
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            held -= len;
            self.stats.evicted += 1;
        }
        Ok(())
    }
}

fn crc_of(ids: &[u32]) -> u32 {
    ids.iter()
        .fold(0, |crc, id| crc32c::crc32c_append(crc, &id.to_le_bytes()))
}

/// Marks a state as used now; whether it is there.
fn touch(path: &Path) -> bool {
    let file = File::options().append(true).open(path);
    file.is_ok_and(|file| {
        // Only the order of eviction depends on it.
        let _ = file.set_modified(SystemTime::now());
        true
    })
}

/// The locked file that counts what is written in a day.
struct Account(File);

impl Account {
    fn lock(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        file.lock()?;
        Ok(Self(file))
    }

    /// Bytes written today. What cannot be read counts as nothing.
    fn today(&self) -> io::Result<u64> {
        let mut text = String::new();
        // Not text, so not ours.
        let _ = (&self.0).take(ACCOUNT_BYTES as u64).read_to_string(&mut text);
        let mut words = text.split_whitespace().map(str::parse::<u64>);
        match (words.next(), words.next()) {
            (Some(Ok(day)), Some(Ok(bytes))) if day == today() => Ok(bytes),
            _ => Ok(0),
        }
    }

    fn set_today(&self, bytes: u64) -> io::Result<()> {
        // One length, one write: a killed process leaves the old text or the new one.
        let text = format!("{:>20} {bytes:>20}\n", today());
        debug_assert_eq!(text.len(), ACCOUNT_BYTES);
        self.0.write_all_at(text.as_bytes(), 0)
    }
}

/// Days since 1970.
fn today() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or(Duration::ZERO).as_secs() / DAY_S
}
