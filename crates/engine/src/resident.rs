//! Resident tensors and embedding rows, read from the checkpoint's own files.

use crate::error::Error;
use crate::generate::Cancel;
use crate::trunk::{Kept, Making, TrunkFile};
use checkpoint::{Checkpoint, Dtype, TensorInfo};
use drives::{AlignedBuf, DirectFile, Notices};
use kernels::WeightFormat;
use models::{Tensor, TensorSource};
use std::sync::Arc;

/// Name of the embedding, which is never resident.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Reads tensors by name; one file is kept open, since tensors of a layer lie together.
pub(crate) struct Resident<'a> {
    checkpoint: &'a Checkpoint,
    notices: &'a Notices,
    readers: usize,
    cancel: &'a Cancel,
    /// Where some tensors are int8, and what is needed to mend them.
    converted: Option<(&'a TrunkFile, Making<'a>)>,
    open: Option<(usize, DirectFile)>,
    progress: &'a mut dyn FnMut(u64),
    bytes: u64,
}

impl<'a> Resident<'a> {
    /// `progress` is told the bytes read so far.
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        notices: &'a Notices,
        cancel: &'a Cancel,
        converted: Option<(&'a TrunkFile, Making<'a>)>,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self {
            checkpoint,
            notices,
            readers: drives::DEFAULT_DEPTH,
            cancel,
            converted,
            open: None,
            progress,
            bytes: 0,
        }
    }

    fn advance(&mut self, bytes: u64) {
        self.bytes += bytes;
        (self.progress)(self.bytes);
    }

    fn file(&mut self, shard: usize) -> Result<&DirectFile, Error> {
        if self.open.as_ref().is_none_or(|(open, _)| *open != shard) {
            let path = &self.checkpoint.shards()[shard].path;
            self.open = Some((shard, DirectFile::open(path, self.notices)?));
        }
        match &self.open {
            Some((_, file)) => Ok(file),
            None => unreachable!("opened above"),
        }
    }
}

impl TensorSource for Resident<'_> {
    type Error = Error;

    fn tensor(&mut self, name: &str) -> Result<Tensor, Error> {
        self.cancel.check()?;
        let converted = self.converted.as_ref();
        if let Some(([rows, cols], data)) = converted.map_or(Ok(None), |(file, making)| file.tensor(name, making))? {
            self.advance((*data).as_ref().len() as u64);
            return Ok(Tensor {
                format: WeightFormat::Int8,
                shape: vec![rows, cols],
                data,
            });
        }
        let info = *self.checkpoint.tensor(name)?;
        let readers = self.readers;
        let buffer = AlignedBuf::read_range(self.file(info.shard)?, info.offset, info.len as usize, readers)?;
        self.advance(info.len);
        Ok(Tensor {
            format: format(info.dtype),
            shape: info.shape.dims().iter().map(|&n| n as usize).collect(),
            data: Arc::new(Kept(buffer)),
        })
    }
}

fn format(dtype: Dtype) -> WeightFormat {
    match dtype {
        Dtype::F32 => WeightFormat::F32,
        // The schema gives trunk tensors these two types only.
        _ => WeightFormat::Bf16,
    }
}

/// The embedding table on disk: a row is read when its token comes.
pub(crate) struct Embedding {
    file: DirectFile,
    info: TensorInfo,
    row_bytes: usize,
}

impl Embedding {
    pub(crate) fn open(checkpoint: &Checkpoint, notices: &Notices) -> Result<Self, Error> {
        let info = *checkpoint.tensor(EMBEDDING)?;
        let file = DirectFile::open(checkpoint.shards()[info.shard].path.clone(), notices)?;
        Ok(Self {
            file,
            info,
            row_bytes: checkpoint.config().hidden_size * 2,
        })
    }

    /// The rows of `ids`, bf16, one after the other.
    pub(crate) fn rows(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        let mut rows = Vec::with_capacity(ids.len() * self.row_bytes);
        for &id in ids {
            let offset = self.info.offset + id as u64 * self.row_bytes as u64;
            rows.extend_from_slice(AlignedBuf::read_range(&self.file, offset, self.row_bytes, 1)?.bytes());
        }
        Ok(rows)
    }
}
