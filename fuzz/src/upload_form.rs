//! A form with a disk, as a browser or `curl` uploads it.

use std::io::Read;

use podvisor_disk_streams::form::Boundary;
use podvisor_disk_streams::testing::SlowReader;

/// The first line is the header `Content-Type`, the rest is the form. What it holds does not depend
/// on how it arrives. Put into a form, the rest itself arrives as it is.
pub fn run(data: &[u8]) {
    let line = data.iter().position(|byte| *byte == b'\n');
    let (line, rest) = data.split_at(line.unwrap_or(0));
    let form = rest.get(1..).unwrap_or_default();
    let content_type = std::str::from_utf8(line).ok();
    let whole = file(content_type, form, usize::MAX);
    assert_eq!(file(content_type, form, 3), whole);

    let end = b"\r\n--XX";
    if form.windows(end.len()).any(|part| part == end) {
        return;
    }
    let mut given = b"--XX\r\nContent-Disposition: form-data; name=file\r\n\r\n".to_vec();
    given.extend(form);
    given.extend(end);
    given.extend(b"--\r\n");
    let found = file(Some("multipart/form-data; boundary=XX"), &given, 7);
    assert_eq!(found.as_deref(), Some(form));
}

fn file(content_type: Option<&str>, form: &[u8], step: usize) -> Option<Vec<u8>> {
    let boundary = Boundary::of(content_type).ok()?;
    let mut file = Vec::new();
    let mut arriving = boundary.file(SlowReader::new(form, step));
    arriving.read_to_end(&mut file).ok()?;
    Some(file)
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_form_holds_its_file_or_is_refused() {
        crate::smoke::run("upload_form", super::run);
    }
}
