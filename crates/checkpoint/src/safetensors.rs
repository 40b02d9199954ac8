//! The header of a safetensors file, read strictly and without touching the data behind it.
//!
//! A file is an 8-byte little-endian length N, N bytes of JSON (tensor name to dtype, shape and the byte range of
//! its data, counted from the end of the header), then the data. The ranges must cover the data without gap or
//! overlap (safetensors format specification, github.com/huggingface/safetensors).
//!
//! A K3 layer has 5,400 tensors in a header of 824 kB; names are borrowed from the header's bytes, so half a million
//! names never become half a million strings.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{self, MapAccess, SeqAccess, Visitor};

use crate::error::{Error, HeaderFault};
use crate::page_cache::{forget_pages, no_read_ahead};

/// The longest header accepted, in bytes: the limit of the reference implementation.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The most dimensions a tensor may have.
pub const MAX_RANK: usize = 8;

/// Bytes in front of the header: its length.
const LENGTH_BYTES: u64 = 8;

/// The element types of the safetensors format whose elements are whole bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned, 1 byte.
    U8,
    /// Signed, 1 byte.
    I8,
    /// Float of 5 exponent and 2 mantissa bits.
    F8E5M2,
    /// Float of 4 exponent and 3 mantissa bits.
    F8E4M3,
    /// Power of two, 8 exponent bits.
    F8E8M0,
    /// Signed, 2 bytes.
    I16,
    /// Unsigned, 2 bytes.
    U16,
    /// IEEE half precision.
    F16,
    /// The upper half of an [`Dtype::F32`].
    Bf16,
    /// Signed, 4 bytes.
    I32,
    /// Unsigned, 4 bytes.
    U32,
    /// IEEE single precision.
    F32,
    /// Signed, 8 bytes.
    I64,
    /// Unsigned, 8 bytes.
    U64,
    /// IEEE double precision.
    F64,
}

/// Every type with its name in a header and its size in bytes.
const DTYPES: [(Dtype, &str, u64); 16] = [
    (Dtype::Bool, "BOOL", 1),
    (Dtype::U8, "U8", 1),
    (Dtype::I8, "I8", 1),
    (Dtype::F8E5M2, "F8_E5M2", 1),
    (Dtype::F8E4M3, "F8_E4M3", 1),
    (Dtype::F8E8M0, "F8_E8M0", 1),
    (Dtype::I16, "I16", 2),
    (Dtype::U16, "U16", 2),
    (Dtype::F16, "F16", 2),
    (Dtype::Bf16, "BF16", 2),
    (Dtype::I32, "I32", 4),
    (Dtype::U32, "U32", 4),
    (Dtype::F32, "F32", 4),
    (Dtype::I64, "I64", 8),
    (Dtype::U64, "U64", 8),
    (Dtype::F64, "F64", 8),
];

impl Dtype {
    /// The type with this name in a header, such as `BF16`.
    pub fn from_name(name: &str) -> Option<Dtype> {
        DTYPES.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// The name in a header.
    pub fn name(self) -> &'static str {
        DTYPES[self as usize].1
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        DTYPES[self as usize].2
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The dimensions of a tensor, outermost first, without a heap allocation.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Shape {
    rank: u8,
    dims: [u64; MAX_RANK],
}

impl Shape {
    /// A shape of at most [`MAX_RANK`] dimensions; `None` if there are more.
    pub fn new(dims: &[u64]) -> Option<Shape> {
        let mut shape = Shape {
            rank: u8::try_from(dims.len()).ok()?,
            dims: [0; MAX_RANK],
        };
        shape.dims.get_mut(..dims.len())?.copy_from_slice(dims);
        Some(shape)
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..usize::from(self.rank)]
    }

    /// The number of elements, or `None` past 2^64.
    pub fn elements(&self) -> Option<u64> {
        self.dims()
            .iter()
            .try_fold(1u64, |product, &dim| product.checked_mul(dim))
    }

    /// The number of bytes at `dtype`, or `None` past 2^64.
    pub fn bytes(&self, dtype: Dtype) -> Option<u64> {
        self.elements()?.checked_mul(dtype.bytes())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One tensor of a header.
#[derive(Debug, Clone)]
pub struct HeaderEntry<'a> {
    /// The tensor's name in full.
    pub name: Cow<'a, str>,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Shape,
    /// First byte, counted from the end of the header.
    pub begin: u64,
    /// One past the last byte, counted from the end of the header.
    pub end: u64,
}

/// The bytes of a shard's header and the lengths around it.
#[derive(Debug)]
pub struct RawHeader {
    path: PathBuf,
    json: Vec<u8>,
    file_len: u64,
}

impl RawHeader {
    /// Reads the header of the file at `path`, and nothing behind it.
    ///
    /// # Errors
    ///
    /// The file cannot be read, claims a header longer than [`MAX_HEADER_BYTES`], or ends inside its header.
    pub fn read(path: &Path) -> Result<RawHeader, Error> {
        let mut file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
        let meta = file.metadata().map_err(|e| Error::io(path, "read the length", e))?;
        if meta.is_dir() {
            return Err(Error::io(path, "read", std::io::ErrorKind::IsADirectory.into()));
        }
        no_read_ahead(&file);
        let file_len = meta.len();
        if file_len < LENGTH_BYTES {
            return Err(Error::ShortShard {
                path: path.to_owned(),
                found: file_len,
                expected: LENGTH_BYTES,
            });
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length).map_err(|e| Error::io(path, "read", e))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES {
            return Err(Error::HeaderLength {
                path: path.to_owned(),
                found: length,
                limit: MAX_HEADER_BYTES,
            });
        }
        if length + LENGTH_BYTES > file_len {
            let expected = length + LENGTH_BYTES;
            return Err(Error::ShortShard {
                path: path.to_owned(),
                found: file_len,
                expected,
            });
        }
        let mut json = vec![0; length as usize];
        file.read_exact(&mut json).map_err(|e| Error::io(path, "read", e))?;
        forget_pages(&file);
        Ok(RawHeader {
            path: path.to_owned(),
            json,
            file_len,
        })
    }

    /// The length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Offset in the file of the first byte of data.
    pub fn data_start(&self) -> u64 {
        LENGTH_BYTES + self.json.len() as u64
    }

    /// The tensors of the file in the order of their data.
    ///
    /// # Errors
    ///
    /// The JSON does not parse, or an entry is wrong in itself ([`HeaderFault`]). Whether the file is as long as
    /// the header says is asked separately: see [`RawHeader::check_len`].
    pub fn entries(&self) -> Result<Vec<HeaderEntry<'_>>, Error> {
        parse_entries(&self.path, &self.json)
    }

    /// Compares the length of the file with the one that `entries` imply.
    ///
    /// # Errors
    ///
    /// [`Error::ShortShard`] or [`Error::LongShard`].
    pub fn check_len(&self, entries: &[HeaderEntry<'_>]) -> Result<(), Error> {
        let data = entries.last().map_or(0, |last| last.end);
        let (path, found, expected) = (self.path.clone(), self.file_len, self.data_start().saturating_add(data));
        match found.cmp(&expected) {
            std::cmp::Ordering::Less => Err(Error::ShortShard { path, found, expected }),
            std::cmp::Ordering::Greater => Err(Error::LongShard { path, found, expected }),
            std::cmp::Ordering::Equal => Ok(()),
        }
    }
}

/// Parses the JSON of a header and checks every entry; the result is in the order of the data.
fn parse_entries<'a>(path: &Path, json: &'a [u8]) -> Result<Vec<HeaderEntry<'a>>, Error> {
    let raw: RawEntries<'a> = serde_json::from_slice(json).map_err(|e| Error::HeaderJson {
        path: path.to_owned(),
        detail: e.to_string(),
    })?;
    let mut entries = Vec::with_capacity(raw.0.len());
    for (name, raw) in raw.0 {
        entries.push(check_entry(name, raw).map_err(|fault| fault.at(path))?);
    }
    // An empty tensor sorts in front of the one that begins where it lies.
    entries.sort_by_key(|entry| (entry.begin, entry.end));
    check_cover(&entries).map_err(|fault| fault.at(path))?;
    check_names(&entries).map_err(|fault| fault.at(path))?;
    Ok(entries)
}

/// A fault of one entry, before the path is known.
struct Fault {
    tensor: String,
    fault: HeaderFault,
    found: String,
    expected: String,
}

impl Fault {
    fn at(self, path: &Path) -> Error {
        let Fault {
            tensor,
            fault,
            found,
            expected,
        } = self;
        Error::HeaderEntry {
            path: path.to_owned(),
            tensor,
            fault,
            found,
            expected,
        }
    }
}

/// What one entry says by itself: dtype, rank, and offsets that agree with the shape.
fn check_entry<'a>(name: Cow<'a, str>, raw: RawEntry<'a>) -> Result<HeaderEntry<'a>, Fault> {
    let fault = |fault, found, expected| Fault {
        tensor: name.to_string(),
        fault,
        found,
        expected,
    };
    let Some(dtype) = Dtype::from_name(&raw.dtype) else {
        return Err(fault(
            HeaderFault::UnknownDtype,
            format!("dtype {:?}", raw.dtype),
            "a whole-byte dtype of the safetensors format".to_owned(),
        ));
    };
    let RawShape::Known(shape) = raw.shape else {
        return Err(fault(
            HeaderFault::Rank,
            format!("more than {MAX_RANK} dimensions"),
            format!("at most {MAX_RANK}"),
        ));
    };
    let (begin, end) = raw.data_offsets;
    if begin > end || end > i64::MAX as u64 {
        return Err(fault(
            HeaderFault::Offsets,
            format!("data_offsets [{begin}, {end}]"),
            "a range inside the file".to_owned(),
        ));
    }
    if shape.bytes(dtype) != Some(end - begin) {
        let product = shape
            .bytes(dtype)
            .map_or("more than 2^64".to_owned(), |bytes| bytes.to_string());
        return Err(fault(
            HeaderFault::ByteLength,
            format!("{} bytes (data_offsets [{begin}, {end}])", end - begin),
            format!("{product} ({dtype} {shape})"),
        ));
    }
    Ok(HeaderEntry {
        name,
        dtype,
        shape,
        begin,
        end,
    })
}

/// Each tensor begins where the one before it ends, the first at 0.
fn check_cover(entries: &[HeaderEntry<'_>]) -> Result<(), Fault> {
    let (mut at, mut before) = (0, "the header");
    for entry in entries {
        if entry.begin != at {
            let fault = if entry.begin < at {
                HeaderFault::Overlap
            } else {
                HeaderFault::Gap
            };
            return Err(Fault {
                tensor: entry.name.to_string(),
                fault,
                found: format!("data from offset {}", entry.begin),
                expected: format!("{at}, where {before} ends"),
            });
        }
        (at, before) = (entry.end, &entry.name);
    }
    Ok(())
}

/// No name occurs twice.
fn check_names(entries: &[HeaderEntry<'_>]) -> Result<(), Fault> {
    let mut seen = HashSet::with_capacity(entries.len());
    match entries.iter().find(|entry| !seen.insert(&*entry.name)) {
        None => Ok(()),
        Some(entry) => Err(Fault {
            tensor: entry.name.to_string(),
            fault: HeaderFault::Duplicate,
            found: "the name twice in one header".to_owned(),
            expected: "once".to_owned(),
        }),
    }
}

/// A string that stays in the input unless it holds escapes.
#[derive(Deserialize)]
struct BorrowedStr<'a>(#[serde(borrow)] Cow<'a, str>);

/// An entry as the JSON has it.
#[derive(Deserialize)]
struct RawEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: RawShape,
    data_offsets: (u64, u64),
}

enum RawShape {
    Known(Shape),
    TooManyDims,
}

impl<'de> Deserialize<'de> for RawShape {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<RawShape, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = RawShape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawShape, A::Error> {
                let (mut dims, mut rank) = ([0; MAX_RANK], 0);
                while let Some(dim) = seq.next_element::<u64>()? {
                    if let Some(place) = dims.get_mut(rank) {
                        *place = dim;
                    }
                    rank += 1;
                }
                let shape = dims.get(..rank).and_then(Shape::new);
                Ok(shape.map_or(RawShape::TooManyDims, RawShape::Known))
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}

/// The whole header; `__metadata__` is free-form and dropped.
struct RawEntries<'a>(Vec<(Cow<'a, str>, RawEntry<'a>)>);

impl<'de: 'a, 'a> Deserialize<'de> for RawEntries<'a> {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<RawEntries<'a>, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vec<(Cow<'de, str>, RawEntry<'de>)>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(BorrowedStr(name)) = map.next_key()? {
                    if name == "__metadata__" {
                        map.next_value::<de::IgnoredAny>()?;
                        continue;
                    }
                    let entry = map
                        .next_value()
                        .map_err(|e| de::Error::custom(format_args!("{name}: {e}")))?;
                    entries.push((name, entry));
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Entries).map(RawEntries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(json: &str) -> Result<Vec<HeaderEntry<'_>>, Error> {
        parse_entries(Path::new("shard"), json.as_bytes())
    }

    fn fault(json: &str) -> (HeaderFault, String) {
        match parse(json) {
            Err(e @ Error::HeaderEntry { fault, .. }) => (fault, e.to_string()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn entries_come_in_the_order_of_their_data() {
        let json = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"F32","shape":[2],"data_offsets":[6,14]},
            "none":{"dtype":"U8","shape":[0,7],"data_offsets":[6,6]},
            "a\u0062":{"dtype":"BF16","shape":[3,1],"data_offsets":[0,6],"extra":null}}   "#;
        let entries = parse(json).unwrap();
        let names: Vec<_> = entries.iter().map(|entry| &*entry.name).collect();
        assert_eq!(names, ["ab", "none", "b"]);
        assert_eq!(entries[0].shape.dims(), [3, 1]);
        assert_eq!(entries[2].dtype, Dtype::F32);
        assert!(matches!(entries[2].name, Cow::Borrowed(_)));
    }

    #[test]
    fn every_dtype_has_its_own_row() {
        for (place, row) in DTYPES.iter().enumerate() {
            assert_eq!((row.0 as usize, row.0.name(), row.0.bytes()), (place, row.1, row.2));
            assert_eq!(Dtype::from_name(row.1), Some(row.0));
        }
        assert_eq!(Dtype::from_name("F4"), None);
    }

    #[test]
    fn inconsistent_entries_are_named() {
        let (kind, text) = fault(r#"{"t":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}"#);
        assert_eq!(kind, HeaderFault::UnknownDtype);
        assert!(text.starts_with("shard: t: found dtype \"F31\", expected "), "{text}");

        let (kind, text) = fault(r#"{"t":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}}"#);
        assert_eq!(kind, HeaderFault::ByteLength);
        assert!(
            text.contains("found 20 bytes (data_offsets [0, 20]), expected 24 (F32 [2, 3])"),
            "{text}"
        );

        let huge = r#"{"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
        assert_eq!(fault(huge).0, HeaderFault::ByteLength);
        let backwards = r#"{"t":{"dtype":"U8","shape":[2],"data_offsets":[4,2]}}"#;
        assert_eq!(fault(backwards).0, HeaderFault::Offsets);
        let beyond = r#"{"t":{"dtype":"U8","shape":[2],"data_offsets":[0,18446744073709551615]}}"#;
        assert_eq!(fault(beyond).0, HeaderFault::Offsets);
        let deep = r#"{"t":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}"#;
        assert_eq!(fault(deep).0, HeaderFault::Rank);
    }

    #[test]
    fn overlaps_gaps_and_duplicates_are_named() {
        let pair = |begin: u64, name: &str| {
            format!(
                r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},
                "{name}":{{"dtype":"U8","shape":[4],"data_offsets":[{begin},{}]}}}}"#,
                begin + 4
            )
        };
        let (kind, text) = fault(&pair(3, "b"));
        assert_eq!(kind, HeaderFault::Overlap);
        assert!(
            text.contains("b: found data from offset 3, expected 4, where a ends"),
            "{text}"
        );
        assert_eq!(fault(&pair(5, "b")).0, HeaderFault::Gap);
        assert_eq!(fault(&pair(4, "a")).0, HeaderFault::Duplicate);
        assert_eq!(parse(&pair(4, "b")).unwrap().len(), 2);
    }

    #[test]
    fn broken_json_is_one_line_with_the_tensor() {
        for json in [
            "",
            "[]",
            "{",
            "{\"t\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}",
            "{}x",
        ] {
            let text = parse(json).unwrap_err().to_string();
            assert!(
                text.starts_with("shard: found a header that does not parse ("),
                "{text}"
            );
            assert!(!text.contains('\n'));
        }
        let text = parse(r#"{"t":{"dtype":"U8","shape":[1]}}"#).unwrap_err().to_string();
        assert!(text.contains("t: missing field `data_offsets`"), "{text}");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse_entries(Path::new("shard"), &bytes);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &bytes).unwrap();
            if let Ok(header) = RawHeader::read(file.path()) {
                let _ = header.entries();
            }
        }

        #[test]
        fn a_damaged_header_is_refused_or_consistent(at in 0usize..160, byte in any::<u8>()) {
            let good = br#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2,2],"data_offsets":[4,20]},"c":{"dtype":"BF16","shape":[1],"data_offsets":[20,22]}}"#;
            let mut bytes = good.to_vec();
            bytes[at] = byte;
            if let Ok(entries) = parse_entries(Path::new("shard"), &bytes) {
                let total: u64 = entries.iter().map(|e| e.shape.bytes(e.dtype).unwrap()).sum();
                prop_assert_eq!(total, entries.last().map_or(0, |e| e.end));
            }
        }
    }
}
