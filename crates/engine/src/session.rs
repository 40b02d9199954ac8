//! State that lasts: a sequence in a file, and back, bit for bit. `docs/sessions.md` draws the format.

mod atomic;
mod error;
mod format;
mod identity;
mod store;

pub use error::SessionError;
pub use format::Session;
pub use identity::Identity;
pub use store::{
    PREFIX_DAILY_BYTES, PREFIX_HELD_BYTES, PREFIX_INTERVAL_TOKENS, PrefixLimits, PrefixStats, PrefixStore,
};

use crate::engine::Engine;
use crate::error::Error;
use crate::sequence::Sequence;
use atomic::AtomicFile;
use format::{Header, SumWriter, layer_part};
use std::io::Write;
use std::path::Path;

impl Engine {
    /// What tells this model from others, read from its files when first asked for.
    pub fn identity(&self) -> Result<Identity, Error> {
        if let Some(known) = self.identity.get() {
            return Ok(*known);
        }
        let read = Identity::read(self.checkpoint())?;
        Ok(*self.identity.get_or_init(|| read))
    }

    fn header(&self, sequence: &Sequence, pending: &[u32], note: &[u8]) -> Result<Header, Error> {
        Ok(Header {
            identity: self.identity()?,
            mla_eps: self.mla_eps(),
            kv: self.plan().kv,
            trunk: self.trunk(),
            tokens: sequence.ids.len() as u64,
            pending: pending.len() as u32,
            note: note.len() as u32,
        })
    }

    /// Bytes of the file that [`save`](Self::save) writes.
    pub fn session_bytes(&self, sequence: &Sequence, pending: &[u32], note: &[u8]) -> Result<u64, Error> {
        Ok(self.header(sequence, pending, note)?.file_bytes(self.config()))
    }

    /// Writes `sequence` to a session file, which is replaced in one step or not at all. `pending` are tokens that were
    /// chosen but not fed, `note` is the caller's. Returns the bytes of the file.
    ///
    /// # Errors
    ///
    /// [`Error::Spoilt`] after a pass that failed midway; [`Error::Session`] when the file cannot be written.
    pub fn save(&self, sequence: &Sequence, pending: &[u32], note: &[u8], path: &Path) -> Result<u64, Error> {
        sequence.check_whole()?;
        let header = self.header(sequence, pending, note)?;
        let mut file = AtomicFile::create(path)?;
        let failed = |error| SessionError::io(path, "write", error);
        file.write_all(&header.bytes()).map_err(failed)?;
        let mut part = 0;
        let mut write = |fill: &mut dyn FnMut(&mut dyn Write) -> std::io::Result<()>| {
            let mut sum = SumWriter::new(&mut file, part);
            part += 1;
            fill(&mut sum).and_then(|()| sum.finish()).map_err(failed)
        };
        write(&mut |to| {
            let mut ids = sequence.ids.iter().chain(pending);
            ids.try_for_each(|id| to.write_all(&id.to_le_bytes()))
        })?;
        write(&mut |to| to.write_all(note))?;
        for layer in 0..sequence.state.layers() {
            write(&mut |to| sequence.state.save_layer(self.cpu(), layer, to))?;
        }
        file.finish()?;
        Ok(header.file_bytes(self.config()))
    }

    /// The sequence that a session file holds.
    ///
    /// # Errors
    ///
    /// [`Error::Session`] when the file is damaged or was written with another model or other settings;
    /// [`Error::Context`] when it has more tokens than the memory plan has positions for. Both are told before the
    /// state is read, save damage in it.
    pub fn restore(&self, session: Session) -> Result<Sequence, Error> {
        let (path, header) = (session.path(), session.header());
        header.check_made_with(path, &self.identity()?, self.mla_eps(), self.plan().kv, self.trunk())?;
        let last = self.config().vocab_size as u32 - 1;
        if let Some(&found) = session.ids().iter().chain(session.pending()).find(|&&id| id > last) {
            return Err(Error::TokenId { found, last });
        }
        let positions = session.ids().len();
        self.check_positions(positions)?;
        session.check_length(header.file_bytes(self.config()))?;
        let mut sequence = self.new_sequence();
        let (mut parts, ids) = session.into_parts();
        for layer in 0..sequence.state.layers() {
            let state = &mut sequence.state;
            parts.read(layer_part(layer), |from| {
                state.load_layer(self.cpu(), layer, positions, from)
            })?;
        }
        sequence.ids = ids;
        Ok(sequence)
    }
}
