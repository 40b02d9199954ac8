//! Placeholder of the workspace layout.

pub mod chat;
pub mod tokenizer;
