//! A pack's header and index in bytes.

use std::path::Path;

use super::{PackContents, PackError, PackIndex, PackRange, PackShard, check_contents};
use crate::buffer::AlignedBuf;
use crate::fields::Fields;
use crate::file::DirectFile;
use crate::layout::ExpertId;
use crate::notice::Notices;
use crate::pack::FileIdentity;
use crate::page::{PAGE_BYTES, in_page, page_ceil};

/// End of a pack's file name.
pub const PACK_SUFFIX: &str = ".pack";
/// Added to the name of a pack while it is written.
pub const PARTIAL_SUFFIX: &str = ".partial";
/// Usual size of a checksum chunk in bytes. An expert of Kimi K3 has 134 or 135 of them; all its experts have 44 MB of checksums.
pub const CHECKSUM_CHUNK_BYTES: u32 = 128 << 10;
/// Largest checksum chunk in bytes.
pub const MAX_CHECKSUM_CHUNK_BYTES: u32 = 8 << 20;
/// Longest index in bytes: five times that of a pack with every expert of Kimi K3.
pub const MAX_INDEX_BYTES: u64 = 256 << 20;
/// Longest name of a shard in bytes, as file systems have it.
pub const MAX_NAME_BYTES: usize = 255;

const MAGIC: [u8; 8] = *b"ANABRPAK";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;
/// The header has a page of its own.
const INDEX_OFFSET: u64 = PAGE_BYTES as u64;
/// Bytes of a shard record without its name.
const SHARD_BYTES: usize = 18;
const RANGE_BYTES: usize = 56;
const CHECKSUM_BYTES: usize = size_of::<u32>();

/// Length of an index without its padding.
pub(super) fn index_bytes(shards: &[PackShard], ranges: usize, checksums: usize) -> u64 {
    let names: usize = shards.iter().map(|shard| SHARD_BYTES + shard.name.len()).sum();
    let total = |ranges: usize, checksums: usize| {
        names
            .checked_add(ranges.checked_mul(RANGE_BYTES)?)?
            .checked_add(checksums.checked_mul(CHECKSUM_BYTES)?)
    };
    total(ranges, checksums).map_or(u64::MAX, |bytes| bytes as u64)
}

/// Where the data begins behind an index of `index_bytes` bytes.
pub(super) fn data_offset(index_bytes: u64) -> u64 {
    page_ceil(INDEX_OFFSET.saturating_add(index_bytes)).unwrap_or(u64::MAX)
}

/// See [`PackContents::fingerprint`].
pub(super) fn fingerprint(contents: &PackContents) -> u32 {
    let mut bytes = contents.chunk_bytes.to_le_bytes().to_vec();
    encode_tables(contents, &mut bytes);
    crc32c::crc32c(&bytes)
}

/// Header and index, padded to whole pages.
pub(super) fn encode(contents: &PackContents, checksums: &[u32]) -> Vec<u8> {
    let mut index = Vec::new();
    encode_tables(contents, &mut index);
    for checksum in checksums {
        index.extend(checksum.to_le_bytes());
    }
    let mut bytes = Vec::with_capacity(contents.data_offset as usize);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(contents.chunk_bytes.to_le_bytes());
    bytes.extend(contents.file_len.to_le_bytes());
    bytes.extend(contents.data_offset.to_le_bytes());
    bytes.extend((index.len() as u64).to_le_bytes());
    bytes.extend((contents.shards.len() as u32).to_le_bytes());
    bytes.extend((contents.ranges.len() as u32).to_le_bytes());
    bytes.extend((checksums.len() as u64).to_le_bytes());
    bytes.extend(crc32c::crc32c(&index).to_le_bytes());
    let header_crc = crc32c::crc32c(&bytes);
    bytes.extend(header_crc.to_le_bytes());
    debug_assert_eq!(bytes.len(), HEADER_BYTES);
    bytes.resize(INDEX_OFFSET as usize, 0);
    bytes.extend(index);
    bytes.resize(contents.data_offset as usize, 0);
    bytes
}

fn encode_tables(contents: &PackContents, bytes: &mut Vec<u8>) {
    for PackShard { name, identity } in &contents.shards {
        bytes.extend(identity.len.to_le_bytes());
        bytes.extend(identity.head_crc.to_le_bytes());
        bytes.extend(identity.sample_crc.to_le_bytes());
        bytes.extend((name.len() as u16).to_le_bytes());
        bytes.extend(name.as_bytes());
    }
    for range in &contents.ranges {
        for number in [range.expert.layer, range.expert.expert, range.extent, range.shard] {
            bytes.extend(number.to_le_bytes());
        }
        for number in [
            range.extent_offset,
            range.extent_len,
            range.start,
            range.len,
            range.offset,
        ] {
            bytes.extend(number.to_le_bytes());
        }
    }
}

struct Header {
    chunk_bytes: u32,
    file_len: u64,
    data_offset: u64,
    index_bytes: u64,
    shards: u32,
    ranges: u32,
    checksums: u64,
    index_crc: u32,
}

impl PackIndex {
    /// Reads and checks the header and the index of a pack. The data is not read.
    ///
    /// # Errors
    ///
    /// [`PackError::Malformed`] when the file is no pack, is cut off, or its index is damaged or contradicts itself;
    /// [`PackError::Version`]; [`PackError::Read`].
    pub fn open(path: &Path, notices: &Notices) -> Result<Self, PackError> {
        let file = DirectFile::open(path, notices)?;
        let header = read_header(&file)?;
        let index = AlignedBuf::read_range(&file, INDEX_OFFSET, header.index_bytes as usize, 1)?;
        let found = crc32c::crc32c(index.bytes());
        if found != header.index_crc {
            let (found, expected) = (format!("{found:08x}"), format!("{:08x}", header.index_crc));
            return Err(PackError::malformed(
                path,
                format!("an index with checksum {found}"),
                expected,
            ));
        }
        let (contents, checksums) =
            decode(&header, index.bytes()).map_err(|found| PackError::malformed(path, found, "an index as written"))?;
        Ok(Self {
            path: path.to_path_buf(),
            contents,
            checksums,
        })
    }
}

fn read_header(file: &DirectFile) -> Result<Header, PackError> {
    let path = file.path();
    let refuse =
        |found: String, expected: &dyn std::fmt::Display| PackError::malformed(path, found, expected.to_string());
    if file.len() < INDEX_OFFSET {
        return Err(refuse(
            format!("{} bytes", file.len()),
            &format!("a pack of at least {INDEX_OFFSET}"),
        ));
    }
    let page = AlignedBuf::read_range(file, 0, HEADER_BYTES, 1)?;
    let mut fields = Fields(page.bytes());
    let magic: [u8; 8] = fields.take();
    if magic != MAGIC {
        return Err(refuse(
            format!("a file that begins with \"{}\"", magic.escape_ascii()),
            &format!("a pack, which begins with \"{}\"", MAGIC.escape_ascii()),
        ));
    }
    let version = fields.u32();
    if version != VERSION {
        return Err(PackError::Version {
            path: path.to_path_buf(),
            found: version,
            expected: VERSION,
        });
    }
    let header = Header {
        chunk_bytes: fields.u32(),
        file_len: fields.u64(),
        data_offset: fields.u64(),
        index_bytes: fields.u64(),
        shards: fields.u32(),
        ranges: fields.u32(),
        checksums: fields.u64(),
        index_crc: fields.u32(),
    };
    let (found, expected) = (crc32c::crc32c(&page.bytes()[..HEADER_BYTES - 4]), fields.u32());
    if found != expected {
        return Err(refuse(
            format!("a header with checksum {found:08x}"),
            &format!("{expected:08x}"),
        ));
    }
    if file.len() != header.file_len {
        return Err(refuse(format!("{} bytes", file.len()), &header.file_len));
    }
    if header.index_bytes > MAX_INDEX_BYTES || header.data_offset != data_offset(header.index_bytes) {
        let expected = format!("at most {MAX_INDEX_BYTES}, with the data on the page behind");
        let found = format!(
            "an index of {} bytes and data at {}",
            header.index_bytes, header.data_offset
        );
        return Err(refuse(found, &expected));
    }
    Ok(header)
}

/// The index's tables, or what is wrong with them.
fn decode(header: &Header, index: &[u8]) -> Result<(PackContents, Vec<u32>), String> {
    let mut fields = Fields(index);
    let cut = || format!("an index of {} bytes that ends too early", index.len());
    let mut shards = Vec::new();
    for _ in 0..header.shards {
        let mut record = Fields(fields.bytes(SHARD_BYTES).ok_or_else(cut)?);
        let identity = FileIdentity {
            len: record.u64(),
            head_crc: record.u32(),
            sample_crc: record.u32(),
        };
        let name_bytes = usize::from(record.u16());
        let name = fields.bytes(name_bytes).ok_or_else(cut)?;
        let name = String::from_utf8(name.to_vec()).map_err(|_| "a shard name that is not UTF-8".to_owned())?;
        shards.push(PackShard { name, identity });
    }
    let (ranges, checksums) = (
        header.ranges as usize,
        usize::try_from(header.checksums).unwrap_or(usize::MAX),
    );
    if index_bytes(&shards, ranges, checksums) != index.len() as u64 {
        return Err(format!(
            "an index of {} bytes for {ranges} ranges and {checksums} checksums",
            index.len()
        ));
    }
    let ranges: Vec<PackRange> = (0..ranges)
        .map(|_| PackRange {
            expert: ExpertId {
                layer: fields.u32(),
                expert: fields.u32(),
            },
            extent: fields.u32(),
            shard: fields.u32(),
            extent_offset: fields.u64(),
            extent_len: fields.u64(),
            start: fields.u64(),
            len: fields.u64(),
            offset: fields.u64(),
        })
        .collect();
    let checksums: Vec<u32> = (0..checksums).map(|_| fields.u32()).collect();
    check_contents(header.chunk_bytes, &shards, &ranges)?;
    for range in &ranges {
        let pages = range
            .offset
            .checked_add(range.len)
            .and_then(page_ceil)
            .filter(|&end| end <= header.file_len && range.offset >= header.data_offset);
        let congruent = in_page(range.offset) == in_page(range.offset_in_shard());
        if pages.is_none() || !congruent {
            return Err(format!(
                "expert {} at offset {}, outside the data or shifted in its page",
                range.expert, range.offset
            ));
        }
    }
    let mut contents = PackContents::placed(header.chunk_bytes, shards, ranges);
    contents.file_len = header.file_len;
    if contents.chunk_total() != checksums.len() {
        let (found, expected) = (checksums.len(), contents.chunk_total());
        return Err(format!("{found} checksums for {expected} chunks"));
    }
    Ok((contents, checksums))
}
