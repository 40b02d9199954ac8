//! The bytes of a session file.

use super::{Identity, SessionError};
use crate::trunk::TrunkFormat;
use checkpoint::K3Config;
use kernels::{KvFormat, NUMERICS_VERSION};
use models::kimi_k3::saved_bytes;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"ANABSESS";
/// Version of the format in `docs/sessions.md`.
const VERSION: u32 = 1;
/// The same with a field for the trunk, written where that is not as published: programs that know no other refuse it.
const TRUNK_VERSION: u32 = 2;
const HEADER_BYTES: usize = 64;
const CRC_BYTES: u64 = 4;
const ID_BYTES: u64 = 4;
const IDS_PART: u32 = 0;
const NOTE_PART: u32 = 1;
/// Bytes read at one time.
const BUFFER_BYTES: usize = 128 << 10;

/// The part with a layer's state.
pub(super) fn layer_part(layer: usize) -> u32 {
    NOTE_PART + 1 + layer as u32
}

/// The fields of a header, versions apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Header {
    pub(super) identity: Identity,
    pub(super) mla_eps: f32,
    pub(super) kv: KvFormat,
    pub(super) trunk: TrunkFormat,
    pub(super) pending: u32,
    pub(super) tokens: u64,
    pub(super) note: u32,
}

impl Header {
    pub(super) fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        let version = if self.trunk.is_exact() { VERSION } else { TRUNK_VERSION };
        bytes.extend(version.to_le_bytes());
        bytes.extend(NUMERICS_VERSION.to_le_bytes());
        bytes.extend(self.identity.bytes.to_le_bytes());
        let Identity {
            config_crc,
            heads_crc,
            samples_crc,
            ..
        } = self.identity;
        let formats = (self.kv == KvFormat::Bf16) as u32 | ((self.trunk == TrunkFormat::Int8) as u32) << 16;
        for field in [
            config_crc,
            heads_crc,
            samples_crc,
            self.mla_eps.to_bits(),
            formats,
            self.pending,
        ] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(self.tokens.to_le_bytes());
        bytes.extend(self.note.to_le_bytes());
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&bytes);
        header
    }

    fn read(path: &Path, bytes: &[u8; HEADER_BYTES]) -> Result<Self, SessionError> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u32_at(at) as u64 | (u32_at(at + 4) as u64) << 32;
        if &bytes[..8] != MAGIC {
            return Err(SessionError::NotASession {
                path: path.to_path_buf(),
            });
        }
        let version = |what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(SessionError::Version {
                path: path.to_path_buf(),
                what,
                found,
                expected,
            }),
        };
        // Another version may keep its checksum elsewhere, so the format comes first.
        if u32_at(8) != VERSION {
            version("format", u32_at(8), TRUNK_VERSION)?;
        }
        check_crc(path, "the header", crc32c::crc32c(&bytes[..60]), u32_at(60))?;
        version("arithmetic (numerics)", u32_at(12), NUMERICS_VERSION)?;
        Ok(Self {
            identity: Identity {
                bytes: u64_at(16),
                config_crc: u32_at(24),
                heads_crc: u32_at(28),
                samples_crc: u32_at(32),
            },
            mla_eps: f32::from_bits(u32_at(36)),
            kv: match u32_at(40) & 0xffff {
                0 => KvFormat::F32,
                1 => KvFormat::Bf16,
                other => return Err(SessionError::damaged(path, format!("latent format {other}"), "0 or 1")),
            },
            trunk: match u32_at(40) >> 16 {
                0 => TrunkFormat::Bf16,
                1 => TrunkFormat::Int8,
                other => return Err(SessionError::damaged(path, format!("trunk format {other}"), "0 or 1")),
            },
            pending: u32_at(44),
            tokens: u64_at(48),
            note: u32_at(56),
        })
    }

    /// Bytes up to the first layer; `None` where that is beyond any file.
    fn front_bytes(&self) -> Option<u64> {
        let ids = self.tokens.checked_add(self.pending.into())?.checked_mul(ID_BYTES)?;
        ids.checked_add(HEADER_BYTES as u64 + u64::from(self.note) + 2 * CRC_BYTES)
    }

    /// Bytes of the whole file for a model of this configuration.
    pub(super) fn file_bytes(&self, c: &K3Config) -> u64 {
        let layers = (0..c.num_hidden_layers)
            .map(|layer| saved_bytes(c, layer, self.tokens as usize, self.kv) + CRC_BYTES)
            .sum::<u64>();
        self.front_bytes().unwrap_or(u64::MAX).saturating_add(layers)
    }

    /// Refuses a file that was written with another model or other settings.
    pub(super) fn check_made_with(
        &self,
        path: &Path,
        identity: &Identity,
        mla_eps: f32,
        kv: KvFormat,
        trunk: TrunkFormat,
    ) -> Result<(), SessionError> {
        let refuse = |found, expected, next| {
            Err(SessionError::Foreign {
                path: path.to_path_buf(),
                found,
                expected,
                next,
            })
        };
        if let Some((found, expected)) = self.identity.difference(identity) {
            return refuse(
                found,
                expected,
                "name the model that the session was made with, or another file",
            );
        }
        if self.kv != kv {
            let (found, expected) = (format!("latents in {}", self.kv), kv.to_string());
            return refuse(
                found,
                expected,
                "give the --kv that the session was made with, or another file",
            );
        }
        if self.trunk != trunk {
            let (found, expected) = (format!("a trunk of {}", self.trunk.label()), trunk.label());
            return refuse(
                found,
                expected,
                "give the --trunk that the session was made with, or another file",
            );
        }
        if self.mla_eps.to_bits() != mla_eps.to_bits() {
            let (found, expected) = (format!("an MLA epsilon of {:e}", self.mla_eps), format!("{mla_eps:e}"));
            return refuse(
                found,
                expected,
                "give the --mla-eps that the session was made with, or another file",
            );
        }
        Ok(())
    }
}

fn check_crc(path: &Path, what: &str, found: u32, expected: u32) -> Result<(), SessionError> {
    match found == expected {
        true => Ok(()),
        false => Err(SessionError::damaged(
            path,
            format!("checksum {found:08x} of {what}"),
            format!("{expected:08x}"),
        )),
    }
}

/// A session file, open: header, tokens and note have been read and are right; the state is still in the file.
#[derive(Debug)]
pub struct Session {
    header: Header,
    ids: Vec<u32>,
    pending: Vec<u32>,
    note: Vec<u8>,
    parts: Parts,
}

/// The parts of a file, in order.
#[derive(Debug)]
pub(super) struct Parts {
    file: BufReader<File>,
    path: PathBuf,
    len: u64,
}

impl Session {
    /// Opens a session file. No model is needed for that.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is something else, of another version, or damaged so far.
    pub fn open(path: &Path) -> Result<Self, SessionError> {
        let failed = |error| SessionError::io(path, "open", error);
        let file = File::open(path).map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        if !about.is_file() {
            return Err(SessionError::NotASession {
                path: path.to_path_buf(),
            });
        }
        let mut parts = Parts {
            file: BufReader::with_capacity(BUFFER_BYTES, file),
            path: path.to_path_buf(),
            len: about.len(),
        };
        let mut bytes = [0; HEADER_BYTES];
        let got = parts.file.read_exact(&mut bytes);
        if got.is_err() || about.len() < HEADER_BYTES as u64 {
            return Err(SessionError::NotASession {
                path: path.to_path_buf(),
            });
        }
        let header = Header::read(path, &bytes)?;
        // Before memory is taken for what the header says.
        match header.front_bytes() {
            Some(front) if front <= about.len() => {}
            _ => {
                let found = format!("{} bytes", about.len());
                return Err(SessionError::damaged(
                    path,
                    found,
                    format!("more for {} tokens", header.tokens),
                ));
            }
        }
        let (tokens, pending) = (header.tokens as usize, header.pending as usize);
        let mut ids = vec![0; (tokens + pending) * ID_BYTES as usize];
        parts.read(IDS_PART, |from| from.read_exact(&mut ids))?;
        let mut note = vec![0; header.note as usize];
        parts.read(NOTE_PART, |from| from.read_exact(&mut note))?;
        let mut ids: Vec<u32> = ids
            .as_chunks::<4>()
            .0
            .iter()
            .map(|id| u32::from_le_bytes(*id))
            .collect();
        Ok(Self {
            header,
            pending: ids.split_off(tokens),
            ids,
            note,
            parts,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.parts.path
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.parts.len
    }

    /// The tokens that the state has seen.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Tokens that were chosen but not fed.
    pub fn pending(&self) -> &[u32] {
        &self.pending
    }

    /// What the writer noted.
    pub fn note(&self) -> &[u8] {
        &self.note
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    pub(super) fn check_length(&self, expected: u64) -> Result<(), SessionError> {
        match self.parts.len == expected {
            true => Ok(()),
            false => Err(SessionError::damaged(
                self.path(),
                format!("{} bytes", self.parts.len),
                expected.to_string(),
            )),
        }
    }

    pub(super) fn into_parts(self) -> (Parts, Vec<u32>) {
        (self.parts, self.ids)
    }
}

impl Parts {
    /// Lets `take` read all of a part, and compares its checksum.
    pub(super) fn read(
        &mut self,
        part: u32,
        take: impl FnOnce(&mut dyn Read) -> io::Result<()>,
    ) -> Result<(), SessionError> {
        let failed = |error| SessionError::io(&self.path, "read", error);
        let mut sum = SumReader {
            file: &mut self.file,
            crc: crc32c::crc32c(&part.to_le_bytes()),
        };
        take(&mut sum).map_err(failed)?;
        let found = sum.crc;
        let mut expected = [0; CRC_BYTES as usize];
        self.file.read_exact(&mut expected).map_err(failed)?;
        let what = match part {
            IDS_PART => "the tokens".to_owned(),
            NOTE_PART => "the note".to_owned(),
            _ => format!("layer {}", part - layer_part(0)),
        };
        check_crc(&self.path, &what, found, u32::from_le_bytes(expected))
    }
}

struct SumReader<'a> {
    file: &'a mut BufReader<File>,
    crc: u32,
}

impl Read for SumReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let got = self.file.read(bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, &bytes[..got]);
        Ok(got)
    }
}

/// Writes a part and then its checksum.
pub(super) struct SumWriter<'a> {
    to: &'a mut dyn Write,
    crc: u32,
}

impl<'a> SumWriter<'a> {
    pub(super) fn new(to: &'a mut dyn Write, part: u32) -> Self {
        Self {
            to,
            crc: crc32c::crc32c(&part.to_le_bytes()),
        }
    }

    pub(super) fn finish(self) -> io::Result<()> {
        self.to.write_all(&self.crc.to_le_bytes())
    }
}

impl Write for SumWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let put = self.to.write(bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, &bytes[..put]);
        Ok(put)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}
