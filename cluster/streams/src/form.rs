//! A disk in a form (`multipart/form-data`, RFC 7578): the field `file`, front to back.

use std::io::{self, Read};

/// RFC 2046 §5.1.1.
const MAX_BOUNDARY: usize = 70;

/// What may come before the file: other fields, and the headers of all.
const MAX_BEFORE: usize = 64 << 10;

/// What may come behind the file.
const MAX_AFTER: u64 = 64 << 10;

/// Bytes read at a time.
const CHUNK: u64 = 64 << 10;

/// Why a form has no file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormError {
    /// The request is no form.
    #[error("the request is no form: its Content-Type must be multipart/form-data; boundary=…")]
    ContentType,
}

/// What separates the parts of a form.
#[derive(Debug, PartialEq, Eq)]
pub struct Boundary(Vec<u8>);

impl Boundary {
    /// The boundary that the header `Content-Type` names.
    ///
    /// # Errors
    ///
    /// It names no form, or no boundary.
    pub fn of(content_type: Option<&str>) -> Result<Self, FormError> {
        let found = content_type.and_then(parameter);
        found
            .map(|boundary| Self(boundary.as_bytes().to_vec()))
            .ok_or(FormError::ContentType)
    }

    /// The file in a form. Reading it fails where the form was cut off, has no file, or has too
    /// much besides.
    pub fn file<R: Read>(self, form: R) -> FormFile<R> {
        let mut end = b"\r\n--".to_vec();
        end.extend(&self.0);
        FormFile {
            form,
            end,
            // The first boundary may stand at the beginning.
            buffer: b"\r\n".to_vec(),
            at: 0,
            state: State::Before,
        }
    }
}

fn parameter(content_type: &str) -> Option<&str> {
    let mut parts = content_type.split(';').map(str::trim);
    if !parts.next()?.eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parts.find_map(|part| {
        let (name, value) = part.split_once('=')?;
        name.trim()
            .eq_ignore_ascii_case("boundary")
            .then_some(value)
    })?;
    let boundary = boundary.trim().trim_matches('"');
    let is_valid = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    ((1..=MAX_BOUNDARY).contains(&boundary.len()) && boundary.bytes().all(is_valid))
        .then_some(boundary)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Before,
    File,
    End,
}

/// The file in a form, as a stream.
#[derive(Debug)]
pub struct FormFile<R> {
    form: R,
    /// What ends a part.
    end: Vec<u8>,
    buffer: Vec<u8>,
    at: usize,
    state: State,
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn find(hay: &[u8], needle: &[u8]) -> Option<usize> {
    hay.windows(needle.len()).position(|part| part == needle)
}

impl<R: Read> FormFile<R> {
    fn rest(&self) -> &[u8] {
        self.buffer.get(self.at..).unwrap_or_default()
    }

    /// Reads more; a form that ends here was cut off.
    fn more(&mut self) -> io::Result<()> {
        self.buffer.drain(..self.at);
        self.at = 0;
        // As much as there is room for: a form that comes byte by byte is not searched as often.
        let mut chunk = self.form.by_ref().take(CHUNK);
        match chunk.read_to_end(&mut self.buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Goes to the beginning of the file.
    fn skip_to_file(&mut self) -> io::Result<()> {
        let mut before = 0;
        loop {
            let end = self.end.clone();
            self.skip_past(&end, &mut before)?;
            while self.rest().len() < 2 {
                self.more()?;
            }
            if self.rest().starts_with(b"--") {
                return Err(invalid("the form has no field \"file\""));
            }
            let headers = self.skip_past(b"\r\n\r\n", &mut before)?;
            if is_file(&headers) {
                self.state = State::File;
                return Ok(());
            }
        }
    }

    /// Returns what stands before `mark`, and goes behind it.
    fn skip_past(&mut self, mark: &[u8], before: &mut usize) -> io::Result<Vec<u8>> {
        loop {
            if let Some(at) = find(self.rest(), mark) {
                let skipped = self.rest().get(..at).unwrap_or_default().to_vec();
                self.at += at + mark.len();
                *before += at + mark.len();
                return Ok(skipped);
            }
            if *before + self.rest().len() > MAX_BEFORE {
                return Err(invalid("the form has too much before its field \"file\""));
            }
            self.more()?;
        }
    }
}

/// Whether headers are those of the field `file`.
fn is_file(headers: &[u8]) -> bool {
    let text = String::from_utf8_lossy(headers);
    let mut lines = text.split("\r\n").filter_map(|line| line.split_once(':'));
    lines.any(|(name, value)| {
        name.trim().eq_ignore_ascii_case("content-disposition")
            && value.split(';').any(|part| {
                let part = part.trim();
                part == "name=\"file\"" || part == "name=file"
            })
    })
}

impl<R: Read> Read for FormFile<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.state == State::Before {
            self.skip_to_file()?;
        }
        while self.state == State::File {
            let found = find(self.rest(), &self.end);
            // The end may have begun in what was read.
            let safe = self.rest().len().saturating_sub(self.end.len() - 1);
            let length = found.unwrap_or(safe).min(buffer.len());
            if length > 0 {
                let part = self.rest().get(..length).unwrap_or_default();
                if let Some(buffer) = buffer.get_mut(..length) {
                    buffer.copy_from_slice(part);
                }
                self.at += length;
                return Ok(length);
            }
            match found {
                Some(_) => self.state = State::End,
                None if buffer.is_empty() => return Ok(0),
                None => self.more()?,
            }
        }
        // What follows the file does not matter, but that it arrived does.
        let mut rest = self.form.by_ref().take(MAX_AFTER);
        if io::copy(&mut rest, &mut io::sink())? == MAX_AFTER {
            return Err(invalid("the form has too much behind its field \"file\""));
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::SlowReader;

    fn read(form: &[u8], step: usize) -> io::Result<Vec<u8>> {
        let boundary = Boundary(b"XX".to_vec());
        let mut all = Vec::new();
        let arriving = SlowReader::new(form, step);
        boundary.file(arriving).read_to_end(&mut all)?;
        Ok(all)
    }

    fn form(content: &[u8]) -> Vec<u8> {
        let mut form = b"--XX\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nb\r\n--XX\r\n\
            content-disposition: form-data; name=\"file\"; filename=\"<b>\"\r\nX: y\r\n\r\n"
            .to_vec();
        form.extend(content);
        form.extend(b"\r\n--XX--\r\n");
        form
    }

    #[test]
    fn the_file_of_a_form_is_read_however_it_arrives() {
        for content in [
            &b""[..],
            b"abc",
            b"\r\n--X\r\n\r\n--\r\n--Xx",
            &[7; 200_000],
        ] {
            for step in [1, 2, 3, 7, 100_000] {
                if content.len() < 1000 || step > 1000 {
                    assert!(read(&form(content), step).unwrap() == content, "{step}");
                }
            }
        }
    }

    #[test]
    fn a_form_that_is_cut_off_anywhere_has_no_file() {
        let whole = form(b"abcdef");
        let marks = whole.len() - b"--\r\n".len();
        for length in 0..marks {
            assert!(read(&whole[..length], 5).is_err(), "{length}");
        }
    }

    #[test]
    fn a_form_without_the_field_or_with_too_much_before_it_is_refused() {
        let other = b"--XX\r\nContent-Disposition: form-data; name=\"disk\"\r\n\r\nb\r\n--XX--\r\n";
        let error = read(other, 9).unwrap_err();
        assert!(error.to_string().contains("no field"), "{error}");
        let mut long = b"--XX\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n".to_vec();
        long.resize(MAX_BEFORE * 3, b'x');
        let error = read(&long, 1000).unwrap_err();
        assert!(error.to_string().contains("too much"), "{error}");
    }

    #[test]
    fn a_boundary_is_named_by_the_content_type() {
        let of = |text: &str| Boundary::of(Some(text)).ok();
        let found = Some(Boundary(b"a-b".to_vec()));
        assert_eq!(of("multipart/form-data; boundary=a-b"), found);
        assert_eq!(
            of("Multipart/Form-Data; charset=x; Boundary=\"a-b\""),
            found
        );
        for text in [
            "",
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "application/octet-stream; boundary=a",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
        assert!(Boundary::of(None).is_err());
    }

    proptest! {
        #[test]
        fn a_file_of_any_bytes_arrives_as_it_was(
            content in proptest::collection::vec(
                prop_oneof![any::<u8>(), Just(b'\r'), Just(b'-')],
                0..300,
            ),
            step in 1_usize..50,
        ) {
            prop_assume!(find(&content, b"\r\n--XX").is_none());
            prop_assert_eq!(read(&form(&content), step).unwrap(), content);
        }

        #[test]
        fn any_bytes_are_a_form_or_are_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            step in 1_usize..50,
        ) {
            let mut given = form(b"");
            given.truncate(given.len() / 2);
            given.extend(bytes);
            let once = read(&given, step).ok();
            prop_assert_eq!(once, read(&given, usize::MAX).ok());
        }
    }
}
