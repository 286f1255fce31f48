//! Files that the host reads and writes.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::protocol::{Fault, FileOpen, FileRead, FileSeek, FileWrite, Whence};

/// Most files that are open at once.
pub const MAX_FILES: usize = 64;

/// Most bytes of one read: less than was asked for is no error.
const MAX_READ: usize = 4 << 20;

/// Open files by the numbers that the host has.
#[derive(Debug, Default)]
pub(super) struct Files {
    last: i64,
    open: BTreeMap<i64, File>,
}

/// Reads a mode of `fopen`.
fn options(mode: &str) -> Option<OpenOptions> {
    let mut options = OpenOptions::new();
    // The byte for text or not means nothing here.
    match mode.replacen('b', "", 1).as_str() {
        "r" => options.read(true),
        "w" => options.write(true).create(true).truncate(true),
        "a" => options.append(true).create(true),
        "r+" => options.read(true).write(true),
        "w+" => options.read(true).write(true).create(true).truncate(true),
        "a+" => options.read(true).append(true).create(true),
        _ => return None,
    };
    // Without waiting for the other end of a pipe.
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    Some(options)
}

impl Files {
    pub(super) fn open(&mut self, open: &FileOpen) -> Result<Value, Fault> {
        let FileOpen { path, mode } = open;
        if self.open.len() >= MAX_FILES {
            return Err(Fault::new(format!(
                "{MAX_FILES} files are open: close one of them"
            )));
        }
        let options = options(mode)
            .ok_or_else(|| Fault::new(format!("invalid file open mode '{}'", shown(mode))))?;
        let file = options.open(path);
        let file = file.map_err(|error| Fault::io("open file", path, &error))?;
        self.last += 1;
        self.open.insert(self.last, file);
        Ok(json!(self.last))
    }

    fn get(&mut self, handle: i64) -> Result<&mut File, Fault> {
        let file = self.open.get_mut(&handle);
        file.ok_or_else(|| Fault::new(format!("handle '{handle}' has not been found")))
    }

    pub(super) fn read(&mut self, read: &FileRead) -> Result<Value, Fault> {
        let file = self.get(read.handle)?;
        let mut bytes = vec![0; read.count.min(MAX_READ)];
        let (mut filled, mut eof) = (0, false);
        while let Some(rest) = bytes.get_mut(filled..)
            && !rest.is_empty()
        {
            match file.read(rest) {
                Ok(0) => {
                    eof = true;
                    break;
                }
                Ok(count) => filled += count,
                Err(error) if is_for_later(&error) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Fault::io("read", "a file", &error)),
            }
        }
        let data = BASE64.encode(bytes.get(..filled).unwrap_or_default());
        Ok(json!({ "count": filled, "buf-b64": data, "eof": eof }))
    }

    pub(super) fn write(&mut self, write: &FileWrite) -> Result<Value, Fault> {
        let most = write.data.len();
        let count = write.count.unwrap_or(most);
        let wanted = write
            .data
            .get(..count)
            .ok_or_else(|| Fault::new(format!("count is {count}, and there are {most} bytes")))?;
        let file = self.get(write.handle)?;
        let mut written = 0;
        while let Some(rest) = wanted.get(written..)
            && !rest.is_empty()
        {
            match file.write(rest) {
                Ok(0) => break,
                Ok(count) => written += count,
                Err(error) if is_for_later(&error) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The host learns of it by the next one.
                Err(_) if written > 0 => break,
                Err(error) => return Err(Fault::io("write", "a file", &error)),
            }
        }
        Ok(json!({ "count": written, "eof": false }))
    }

    pub(super) fn seek(&mut self, seek: &FileSeek) -> Result<Value, Fault> {
        let file = self.get(seek.handle)?;
        let place =
            match seek.whence {
                Whence::Set => SeekFrom::Start(u64::try_from(seek.offset).map_err(|_| {
                    Fault::new(format!("offset {} is before the file", seek.offset))
                })?),
                Whence::Current => SeekFrom::Current(seek.offset),
                Whence::End => SeekFrom::End(seek.offset),
            };
        let position = file.seek(place);
        let position = position.map_err(|error| Fault::io("seek in", "a file", &error))?;
        Ok(json!({ "position": position, "eof": false }))
    }

    /// Nothing is kept back: what was written is with the system.
    pub(super) fn flush(&mut self, handle: i64) -> Result<Value, Fault> {
        self.get(handle).map(|_| json!({}))
    }

    pub(super) fn close(&mut self, handle: i64) -> Result<Value, Fault> {
        self.get(handle)?;
        self.open.remove(&handle);
        Ok(json!({}))
    }
}

fn is_for_later(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

fn shown(text: &str) -> String {
    text.chars().take(16).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(files: &mut Files, path: &std::path::Path, mode: &str) -> Result<i64, Fault> {
        let opened = files.open(&FileOpen {
            path: path.to_str().unwrap().to_owned(),
            mode: mode.to_owned(),
        });
        opened.map(|handle| handle.as_i64().unwrap())
    }

    fn write(
        files: &mut Files,
        handle: i64,
        data: &[u8],
        count: Option<usize>,
    ) -> Result<(), Fault> {
        let data = data.to_vec();
        let write = FileWrite {
            handle,
            data,
            count,
        };
        files.write(&write).map(drop)
    }

    fn read(files: &mut Files, handle: i64, count: usize) -> (Vec<u8>, bool) {
        let read = files.read(&FileRead { handle, count }).unwrap();
        let data = BASE64.decode(read["buf-b64"].as_str().unwrap()).unwrap();
        (data, read["eof"] == true)
    }

    #[test]
    fn files_are_written_sought_and_read_by_their_modes() {
        let dir = tempfile::tempdir().unwrap();
        let (path, mut files) = (dir.path().join("file"), Files::default());
        let handle = open(&mut files, &path, "w+b").unwrap();
        write(&mut files, handle, b"hello, ", None).unwrap();
        write(&mut files, handle, b"world and more", Some(5)).unwrap();
        files.flush(handle).unwrap();
        let seek = FileSeek {
            handle,
            offset: -5,
            whence: Whence::End,
        };
        assert_eq!(files.seek(&seek).unwrap()["position"], 7);
        assert_eq!(read(&mut files, handle, 5), (b"world".to_vec(), false));
        assert_eq!(read(&mut files, handle, 5), (Vec::new(), true));
        files.close(handle).unwrap();
        let handle = open(&mut files, &path, "ab").unwrap();
        write(&mut files, handle, b"!", None).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"hello, world!");
        let fault = write(&mut files, handle, b"x", Some(2)).unwrap_err();
        assert!(fault.desc.contains("count is 2"), "{fault}");
    }

    #[test]
    fn what_is_not_open_or_cannot_be_is_a_fault() {
        let dir = tempfile::tempdir().unwrap();
        let (path, mut files) = (dir.path().join("file"), Files::default());
        let fault = open(&mut files, &path, "r").unwrap_err();
        assert!(fault.desc.contains("No such file or directory"), "{fault}");
        for mode in ["", "b", "rw", "r++", "bbr", "x"] {
            assert!(open(&mut files, &path, mode).is_err(), "{mode}");
        }
        assert!(files.close(1).unwrap_err().desc.contains("'1'"));
        for _ in 0..MAX_FILES {
            open(&mut files, &path, "w").unwrap();
        }
        let fault = open(&mut files, &path, "w").unwrap_err();
        assert!(fault.desc.contains("64 files"), "{fault}");
        files.close(MAX_FILES as i64).unwrap();
        open(&mut files, &path, "w").unwrap();
    }

    #[test]
    fn a_pipe_without_its_other_end_delays_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        let mut files = Files::default();
        let handle = open(&mut files, &path, "r").unwrap();
        assert_eq!(read(&mut files, handle, 10), (Vec::new(), true));
        files.close(handle).unwrap();
        let fault = open(&mut files, &path, "w").unwrap_err();
        assert!(fault.desc.contains("No such device"), "{fault}");
    }
}
