//! A sequence: its tokens and the state after them.

use crate::error::Error;
use kernels::Cpu;
use models::kimi_k3::State;

/// A sequence: its tokens and the state after them.
pub struct Sequence {
    pub(crate) state: State<Cpu>,
    pub(crate) ids: Vec<u32>,
    pub(crate) spoilt: bool,
    pub(crate) whole_passes: bool,
}

/// What a sequence was at one moment. It shares the latents with the sequence and holds a KDA state of its own.
pub struct Snapshot(Sequence);

impl Sequence {
    pub(crate) fn new(state: State<Cpu>, ids: Vec<u32>) -> Self {
        Self {
            state,
            ids,
            spoilt: false,
            whole_passes: false,
        }
    }

    /// The tokens that the state has seen.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Whether a pass over this sequence failed midway. Its state is of no more use, unless it is rolled back.
    pub fn is_spoilt(&self) -> bool {
        self.spoilt
    }

    /// Lets [`Engine::generate`](crate::Engine::generate) end the pass of a new token before it obeys a request to stop, so
    /// that the state stays of use. The prompt's passes are broken off all the same.
    pub fn decode_in_whole_passes(&mut self) {
        self.whole_passes = true;
    }

    pub(crate) fn check_whole(&self) -> Result<(), Error> {
        match self.spoilt {
            true => Err(Error::Spoilt),
            false => Ok(()),
        }
    }

    /// A second sequence that goes on from here by itself. It takes a sequence's room in the memory plan; latents up to here are shared.
    ///
    /// # Errors
    ///
    /// [`Error::Spoilt`] after a pass that failed midway.
    pub fn branch(&self) -> Result<Sequence, Error> {
        self.check_whole()?;
        Ok(self.copy())
    }

    /// Remembers this moment for [`roll_back`](Self::roll_back).
    ///
    /// # Errors
    ///
    /// [`Error::Spoilt`] after a pass that failed midway.
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        Ok(Snapshot(self.branch()?))
    }

    /// Makes the sequence what it was when the snapshot was taken, also after a pass that failed midway.
    pub fn roll_back(&mut self, to: &Snapshot) {
        *self = to.0.copy();
    }

    fn copy(&self) -> Self {
        Self {
            state: self.state.clone(),
            ids: self.ids.clone(),
            spoilt: self.spoilt,
            whole_passes: self.whole_passes,
        }
    }
}

#[cfg(feature = "testing")]
impl crate::Engine {
    /// A sequence after `ids` whose state is made of `numbers` instead of those tokens' passes. KDA states take as many f32 as
    /// they hold, latents `[tokens, width]` numbers of their format, little-endian, layer after layer.
    ///
    /// # Errors
    ///
    /// [`Error::Context`] beyond the positions that were planned for; the reader's as [`Error::Session`].
    pub fn sequence_of(&self, ids: Vec<u32>, numbers: &mut dyn std::io::Read) -> Result<Sequence, Error> {
        self.check_positions(ids.len())?;
        let mut sequence = self.new_sequence();
        for layer in 0..sequence.state.layers() {
            let loaded = sequence.state.load_layer(self.cpu(), layer, ids.len(), numbers);
            loaded.map_err(|error| crate::SessionError::io("numbers".as_ref(), "read", error))?;
        }
        sequence.ids = ids;
        Ok(sequence)
    }
}
