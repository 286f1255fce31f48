//! The commands and their arguments, in QEMU's names (qga/qapi-schema.json).

use serde::Deserialize;

use super::bounded::{bytes, text, texts};

/// A command that the guest carries out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // QEMU's names.
pub enum Command {
    GetTime,
    /// Nanoseconds since 1970.
    SetTime(Option<i64>),
    Shutdown(ShutdownMode),
    Exec(Exec),
    /// A program's number.
    ExecStatus(i64),
    FileOpen(FileOpen),
    FileRead(FileRead),
    FileWrite(FileWrite),
    FileSeek(FileSeek),
    FileFlush(i64),
    FileClose(i64),
    FreezeStatus,
    /// Where the file systems are mounted; all without it.
    Freeze(Option<Vec<String>>),
    Thaw,
    GetUsers,
    GetInterfaces,
    GetOsInfo,
    GetHostName,
    GetTimeZone,
    GetFileSystems,
    GetVcpus,
    SetVcpus(Vec<Vcpu>),
    /// A user's name.
    GetKeys(String),
    AddKeys(Keys),
    RemoveKeys(Keys),
    SetPassword(Password),
}

/// How the guest is shut down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShutdownMode {
    /// Powered off.
    #[default]
    PowerDown,
    /// Stopped, and not powered off.
    Halt,
    /// Started again.
    Reboot,
}

/// A program to be started.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Exec {
    /// Its path, or a name that is looked for in `PATH`.
    #[serde(deserialize_with = "text")]
    pub path: String,
    /// Its arguments, without its own name.
    #[serde(default, deserialize_with = "texts")]
    pub arg: Vec<String>,
    /// All of its environment, `NAME=VALUE` each; the agent's own if there is none.
    #[serde(default, deserialize_with = "texts")]
    pub env: Vec<String>,
    /// All of its input.
    #[serde(default, deserialize_with = "bytes")]
    pub input_data: Vec<u8>,
    /// Which output is kept.
    #[serde(default)]
    pub capture_output: Capture,
}

/// Which output of a program is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "RawCapture")]
pub enum Capture {
    /// None.
    #[default]
    None,
    /// The standard output.
    Stdout,
    /// The errors.
    Stderr,
    /// Both, each by itself.
    Separated,
    /// Both in one.
    Merged,
}

/// A flag, or one of newer words.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawCapture {
    Flag(bool),
    Word(CaptureWord),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum CaptureWord {
    None,
    Stdout,
    Stderr,
    Separated,
    Merged,
}

impl From<RawCapture> for Capture {
    fn from(raw: RawCapture) -> Self {
        match raw {
            RawCapture::Flag(false) | RawCapture::Word(CaptureWord::None) => Self::None,
            RawCapture::Flag(true) | RawCapture::Word(CaptureWord::Separated) => Self::Separated,
            RawCapture::Word(CaptureWord::Stdout) => Self::Stdout,
            RawCapture::Word(CaptureWord::Stderr) => Self::Stderr,
            RawCapture::Word(CaptureWord::Merged) => Self::Merged,
        }
    }
}

/// A file to be opened.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileOpen {
    /// Its path.
    #[serde(deserialize_with = "text")]
    pub path: String,
    /// As of `fopen`.
    #[serde(default = "read_only")]
    pub mode: String,
}

fn read_only() -> String {
    "r".to_owned()
}

/// Bytes to be read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRead {
    /// An open file's number.
    pub handle: i64,
    /// Most bytes.
    #[serde(default = "some_bytes")]
    pub count: usize,
}

const fn some_bytes() -> usize {
    4096
}

/// Bytes to be written.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileWrite {
    /// An open file's number.
    pub handle: i64,
    /// The bytes.
    #[serde(rename = "buf-b64", deserialize_with = "bytes")]
    pub data: Vec<u8>,
    /// How many of them are written; all without it.
    pub count: Option<usize>,
}

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSeek {
    /// An open file's number.
    pub handle: i64,
    /// Bytes from there.
    pub offset: i64,
    /// From where.
    pub whence: Whence,
}

/// From where a place in a file is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawWhence")]
pub enum Whence {
    /// The beginning.
    Set,
    /// The present place.
    Current,
    /// The end.
    End,
}

/// A number, or one of the words.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawWhence {
    Number(i64),
    Word(WhenceWord),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum WhenceWord {
    Set,
    Cur,
    End,
}

impl TryFrom<RawWhence> for Whence {
    type Error = &'static str;

    fn try_from(raw: RawWhence) -> Result<Self, Self::Error> {
        match raw {
            RawWhence::Number(0) | RawWhence::Word(WhenceWord::Set) => Ok(Self::Set),
            RawWhence::Number(1) | RawWhence::Word(WhenceWord::Cur) => Ok(Self::Current),
            RawWhence::Number(2) | RawWhence::Word(WhenceWord::End) => Ok(Self::End),
            RawWhence::Number(_) => Err("whence is 0, 1 or 2, or set, cur or end"),
        }
    }
}

/// A CPU that is to be online or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Vcpu {
    /// Its number.
    pub logical_id: u32,
    /// Whether it is to be online.
    pub online: bool,
    /// Said by the guest alone.
    #[serde(default)]
    can_offline: Option<bool>,
}

/// Keys by which a user may log in.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keys {
    /// The user's name.
    #[serde(deserialize_with = "text")]
    pub username: String,
    /// Lines of OpenSSH's `authorized_keys`.
    #[serde(deserialize_with = "texts")]
    pub keys: Vec<String>,
    /// Whether they replace those that are there.
    #[serde(default)]
    pub reset: bool,
}

/// A user's password.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Password {
    /// The user's name.
    #[serde(deserialize_with = "text")]
    pub username: String,
    /// The password.
    #[serde(deserialize_with = "bytes")]
    pub password: Vec<u8>,
    /// Whether it is as `/etc/shadow` has it.
    pub crypted: bool,
}

/// Without the password.
impl std::fmt::Debug for Password {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Password")
            .field("username", &self.username)
            .field("crypted", &self.crypted)
            .finish_non_exhaustive()
    }
}
