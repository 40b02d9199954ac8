//! `--session` and `--prefix-store`: what is remembered of earlier runs, and what is left for later ones.

use std::path::{Path, PathBuf};

use checkpoint::chat::{Message, Role};
use engine::{Engine, PrefixStore, Sequence, Session};
use serde::{Deserialize, Serialize};

use crate::answer::Answer;
use crate::error::Error;
use crate::files::{Claim, expect_file};
use crate::output;
use crate::settings::PrefixSettings;

/// A session file and what was in it when the program began.
pub struct SessionFile {
    path: PathBuf,
    /// Nobody else uses the file meanwhile.
    _claim: Option<Claim>,
    stored: Option<Session>,
    /// The conversation so far; `None` for plain text and ids.
    pub messages: Option<Vec<Message>>,
    /// Tokens of plain text or ids so far.
    pub tokens: Vec<u32>,
}

/// What `run` notes in a session file.
#[derive(Serialize, Deserialize)]
struct Note {
    /// The messages of a conversation.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    messages: Option<Vec<Said>>,
}

#[derive(Serialize, Deserialize)]
struct Said {
    role: SaidBy,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    reasoning: Option<String>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SaidBy {
    System,
    User,
    Assistant,
}

impl SessionFile {
    /// No file at all.
    pub fn none(conversation: bool) -> Self {
        Self {
            path: PathBuf::new(),
            _claim: None,
            stored: None,
            messages: conversation.then(Vec::new),
            tokens: vec![],
        }
    }

    /// Opens the session at `path`, which may not exist yet; `conversation` says what it must hold.
    pub fn open(path: &Path, conversation: bool) -> Result<Self, Error> {
        expect_file(path, true)?;
        // It also shows, before any work, that the folder can be written to.
        let claim = Claim::take(path)?.ok_or_else(|| Error::SessionInUse { path: path.to_owned() })?;
        let mut file = Self {
            path: path.to_owned(),
            _claim: Some(claim),
            ..Self::none(conversation)
        };
        match path.try_exists() {
            Ok(true) => {}
            Ok(false) => return Ok(file),
            Err(error) => return Err(Error::file(path, "open", error)),
        }
        let stored = Session::open(path).map_err(engine::Error::from)?;
        let note: Note = serde_json::from_slice(stored.note()).map_err(|error| Error::SessionNote {
            path: path.to_owned(),
            found: format!("a note that is no conversation's ({error})"),
            expected: "one that `run --session` wrote",
        })?;
        let refuse = |found: &str, expected| {
            Err(Error::SessionNote {
                path: path.to_owned(),
                found: found.to_owned(),
                expected,
            })
        };
        match (note.messages, conversation) {
            (Some(said), true) => file.messages = Some(said.into_iter().map(Message::from).collect()),
            (None, true) => {
                return refuse(
                    "plain text",
                    "a conversation (to continue the text give --raw or --ids)",
                );
            }
            (Some(_), false) => return refuse("a conversation", "plain text (leave out --raw or --ids)"),
            (None, false) => file.tokens = [stored.ids(), stored.pending()].concat(),
        }
        file.stored = Some(stored);
        Ok(file)
    }

    /// Tokens that are stored.
    pub fn stored_tokens(&self) -> usize {
        self.stored.as_ref().map_or(0, |stored| stored.ids().len())
    }

    /// The stored sequence, once; `None` where nothing is stored.
    pub fn restore(&mut self, engine: &Engine) -> Result<Option<Sequence>, Error> {
        let Some(stored) = self.stored.take() else {
            return Ok(None);
        };
        let sequence = engine.restore(stored)?;
        let tokens = output::grouped(sequence.ids().len() as u64);
        output::say(format_args!(
            "session {}: {tokens} tokens restored",
            self.path.display()
        ));
        Ok(Some(sequence))
    }

    /// Saves the sequence after an answer to `prompt`, of which all tokens count, and the messages. An answer that never began, or
    /// one that was broken off inside a pass, leaves the file as it is.
    pub fn save(
        &self,
        engine: &Engine,
        sequence: &Sequence,
        prompt: &[u32],
        answer: &Answer,
        messages: Option<&[Message]>,
    ) -> Result<(), Error> {
        if answer.ids.is_empty() || sequence.is_spoilt() {
            output::note(format_args!("session {}: nothing new to save", self.path.display()));
            return Ok(());
        }
        let chosen = &answer.ids[sequence.ids().len() - prompt.len()..];
        // A text goes on where it was seen to end, not behind the mark of its end.
        let stops = engine.checkpoint().stop_ids();
        let pending: Vec<u32> = chosen.iter().copied().filter(|id| !stops.contains(id)).collect();
        let messages = messages.map(|messages| messages.iter().map(Said::from).collect());
        let note = serde_json::to_vec(&Note { messages }).map_err(|e| Error::Output(e.into()))?;
        engine.save(sequence, &pending, &note, &self.path)?;
        Ok(())
    }
}

impl From<&Message> for Said {
    fn from(message: &Message) -> Self {
        Self {
            role: match message.role {
                Role::System => SaidBy::System,
                Role::User => SaidBy::User,
                Role::Assistant => SaidBy::Assistant,
            },
            content: message.content.clone(),
            reasoning: message.reasoning.clone(),
        }
    }
}

impl From<Said> for Message {
    fn from(said: Said) -> Self {
        let role = match said.role {
            SaidBy::System => Role::System,
            SaidBy::User => Role::User,
            SaidBy::Assistant => Role::Assistant,
        };
        let mut message = Message::new(role, said.content);
        message.reasoning = said.reasoning;
        message
    }
}

/// Opens the prefix store, if there shall be one.
pub fn prefix_store(settings: Option<&PrefixSettings>, engine: &Engine) -> Result<Option<PrefixStore>, Error> {
    let open = |settings: &PrefixSettings| PrefixStore::open(&settings.folder, engine, settings.limits);
    Ok(settings.map(open).transpose()?)
}

/// Shows the store's notices.
pub fn pass_notices_on(store: Option<&mut PrefixStore>) {
    for notice in store.into_iter().flat_map(PrefixStore::take_notices) {
        output::note(format_args!("prefix store: {notice}"));
    }
}
