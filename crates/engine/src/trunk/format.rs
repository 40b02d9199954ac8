//! The bytes of a trunk file: header and index. `docs/trunk.md` draws them.

use super::{int8_bytes, is_converted};
use crate::session::Identity;
use checkpoint::Schema;
use drives::{AlignedBuf, DirectFile, Fields, Notices, PAGE_BYTES};
use kernels::NUMERICS_VERSION;
use std::path::Path;

const MAGIC: &[u8; 8] = b"ANABTRNK";
/// Version of the format in `docs/trunk.md`.
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 76;
/// The header has a page of its own.
const INDEX_OFFSET: u64 = PAGE_BYTES as u64;
/// Bytes of a tensor record without its name.
const RECORD_BYTES: usize = 26;
/// Longest index in bytes: a hundred times that of Kimi K3.
const MAX_INDEX_BYTES: u64 = 16 << 20;

/// One converted tensor: its integers, row by row, then a scale for each row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The checkpoint's name, without `language_model.`.
    pub(super) name: String,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Where its bytes begin in the file: on a page border.
    pub(super) offset: u64,
    /// CRC-32C of its bytes.
    pub(super) crc: u32,
}

impl Entry {
    pub(super) fn bytes(&self) -> usize {
        int8_bytes(self.rows as u64, self.cols as u64) as usize
    }
}

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Contents {
    /// The model that it was made of.
    pub(super) identity: Identity,
    /// Where that was, as the system wrote the path.
    pub(super) folder: Vec<u8>,
    pub(super) entries: Vec<Entry>,
    pub(super) data_offset: u64,
    pub(super) file_len: u64,
}

impl Contents {
    /// The file of a model, without its checksums.
    pub(super) fn new(schema: &Schema, identity: Identity, folder: Vec<u8>) -> Self {
        let converted = schema.trunk().iter().filter(|spec| is_converted(spec));
        let mut entries: Vec<Entry> = converted
            .map(|spec| {
                let dims = spec.shape.dims();
                Entry {
                    name: spec.name.clone(),
                    rows: dims[0] as usize,
                    cols: dims[1] as usize,
                    offset: 0,
                    crc: 0,
                }
            })
            .collect();
        let names: usize = entries.iter().map(|entry| RECORD_BYTES + entry.name.len()).sum();
        let page = PAGE_BYTES as u64;
        let data_offset = (INDEX_OFFSET + (folder.len() + names) as u64).next_multiple_of(page);
        let mut next = data_offset;
        for entry in &mut entries {
            entry.offset = next;
            next += (entry.bytes() as u64).next_multiple_of(page);
        }
        Self {
            identity,
            folder,
            entries,
            data_offset,
            file_len: next,
        }
    }

    /// Header and index, in whole pages.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut index = self.folder.clone();
        for entry in &self.entries {
            index.extend((entry.rows as u64).to_le_bytes());
            index.extend((entry.cols as u32).to_le_bytes());
            index.extend(entry.offset.to_le_bytes());
            index.extend(entry.crc.to_le_bytes());
            index.extend((entry.name.len() as u16).to_le_bytes());
            index.extend(entry.name.as_bytes());
        }
        let mut bytes = Vec::with_capacity(self.data_offset as usize);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(NUMERICS_VERSION.to_le_bytes());
        bytes.extend(self.file_len.to_le_bytes());
        bytes.extend(self.data_offset.to_le_bytes());
        bytes.extend((index.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u32).to_le_bytes());
        bytes.extend((self.folder.len() as u32).to_le_bytes());
        bytes.extend(self.identity.bytes.to_le_bytes());
        bytes.extend(self.identity.config_crc.to_le_bytes());
        bytes.extend(self.identity.heads_crc.to_le_bytes());
        bytes.extend(self.identity.samples_crc.to_le_bytes());
        bytes.extend(crc32c::crc32c(&index).to_le_bytes());
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        debug_assert_eq!(bytes.len(), HEADER_BYTES);
        bytes.resize(INDEX_OFFSET as usize, 0);
        bytes.extend(index);
        bytes.resize(self.data_offset as usize, 0);
        bytes
    }

    /// Reads header and index, or says what was found and expected.
    pub(super) fn read(path: &Path, notices: &Notices) -> Result<(DirectFile, Self), String> {
        let failed = |error: drives::Error| error.to_string();
        let file = DirectFile::open(path, notices).map_err(failed)?;
        if file.len() < INDEX_OFFSET {
            return Err(format!("found {} bytes, expected at least {INDEX_OFFSET}", file.len()));
        }
        let header = AlignedBuf::read_range(&file, 0, HEADER_BYTES, 1).map_err(failed)?;
        let mut fields = Fields(header.bytes());
        let expect = |what: &str, found: u64, expected: u64| match found == expected {
            true => Ok(()),
            false => Err(format!("found {what} {found}, expected {expected}")),
        };
        if fields.bytes(MAGIC.len()) != Some(MAGIC) {
            return Err("found another kind of file, expected one that begins with ANABTRNK".into());
        }
        expect("format version", fields.u32().into(), VERSION.into())?;
        let numerics = fields.u32();
        let (file_len, data_offset, index_bytes) = (fields.u64(), fields.u64(), fields.u64());
        let (tensors, folder_bytes) = (fields.u32(), fields.u32() as usize);
        let identity = Identity {
            bytes: fields.u64(),
            config_crc: fields.u32(),
            heads_crc: fields.u32(),
            samples_crc: fields.u32(),
        };
        let index_crc = fields.u32();
        check_crc(
            "the header",
            crc32c::crc32c(&header.bytes()[..HEADER_BYTES - 4]),
            fields.u32(),
        )?;
        expect(
            "arithmetic (numerics) version",
            numerics.into(),
            NUMERICS_VERSION.into(),
        )?;
        expect("a length in bytes of", file.len(), file_len)?;
        if index_bytes > MAX_INDEX_BYTES {
            return Err(format!(
                "found an index of {index_bytes} bytes, expected at most {MAX_INDEX_BYTES}"
            ));
        }
        let index = AlignedBuf::read_range(&file, INDEX_OFFSET, index_bytes as usize, 1).map_err(failed)?;
        check_crc("the index", crc32c::crc32c(index.bytes()), index_crc)?;
        let mut fields = Fields(index.bytes());
        let contents = decode(&mut fields, tensors, folder_bytes);
        let (folder, entries) = contents.ok_or("found an index that ends too early, expected one as written")?;
        let contents = Self {
            identity,
            folder,
            entries,
            data_offset,
            file_len,
        };
        Ok((file, contents))
    }

    /// Whether these are the tensors of this model in their places. Checksums may be any.
    pub(super) fn check_places(&self, schema: &Schema) -> Result<(), String> {
        let expected = Self::new(schema, self.identity, self.folder.clone());
        let mut found = self.clone();
        found.entries.iter_mut().for_each(|entry| entry.crc = 0);
        match found == expected {
            true => Ok(()),
            false => Err(format!(
                "found {} tensors in {} bytes, or in other places, expected {} in {}",
                self.entries.len(),
                self.file_len,
                expected.entries.len(),
                expected.file_len
            )),
        }
    }
}

fn check_crc(what: &str, found: u32, expected: u32) -> Result<(), String> {
    match found == expected {
        true => Ok(()),
        false => Err(format!("found checksum {found:08x} of {what}, expected {expected:08x}")),
    }
}

fn decode(fields: &mut Fields<'_>, tensors: u32, folder_bytes: usize) -> Option<(Vec<u8>, Vec<Entry>)> {
    let folder = fields.bytes(folder_bytes)?.to_vec();
    let mut entries = vec![];
    for _ in 0..tensors {
        let mut record = Fields(fields.bytes(RECORD_BYTES)?);
        let (rows, cols, offset, crc) = (record.u64(), record.u32(), record.u64(), record.u32());
        let name_bytes = record.u16().into();
        entries.push(Entry {
            name: String::from_utf8(fields.bytes(name_bytes)?.to_vec()).ok()?,
            rows: rows as usize,
            cols: cols as usize,
            offset,
            crc,
        });
    }
    Some((folder, entries))
}
