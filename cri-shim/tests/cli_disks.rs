//! Disk images on the command line.

mod support;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener};

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use support::Root;

/// Serves only a file at `/disk.img`; returns its address.
fn serve(file: &'static [u8]) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = format!("http://{}/disk.img", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let first = lines.next().unwrap().unwrap();
            // The header ends at an empty line.
            lines.find(|line| line.as_ref().is_ok_and(String::is_empty));
            let (status, body) = match first.starts_with("GET /disk.img ") {
                true => ("200 OK", file),
                false => ("404 Not Found", &b""[..]),
            };
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(&[head.as_bytes(), body].concat());
        }
    });
    address
}

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

#[test]
fn a_disk_image_is_pulled_listed_and_removed_by_its_address() {
    const FILE: &[u8] = &[7; 3000];
    let (root, url, id) = (Root::default(), serve(FILE), sha256(FILE));
    let pulled = root.output(&["pull", &url]);
    pulled.printed(&format!("{id}\n"));
    assert!(
        pulled.stderr.contains(&format!("Pulling {url}")),
        "{pulled:?}"
    );
    let again = root.output(&["pull", "-q", &url, "--checksum", &id]);
    again.printed(&format!("{id}\n"));
    assert_eq!(again.stderr, "");

    let listed = root.output(&["images", "--disks", "--json"]);
    let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
    assert_eq!(listed[0]["id"], id.as_str());
    assert_eq!(listed[0]["urls"][0], url.as_str());
    assert_eq!(listed[0]["sourceFormat"], "raw");
    // Whole sectors.
    assert_eq!(listed[0]["virtualSize"], 3072);
    let path = listed[0]["path"].as_str().unwrap();
    assert_eq!(std::fs::read(path).unwrap()[..3000], *FILE);
    root.output(&["images", "--disks", "-q"])
        .printed(&format!("{}\n", &id[7..19]));
    let table = root.output(&["images", "--disks"]).stdout;
    assert!(table.starts_with("URL ") && table.contains(&url), "{table}");
    // It is not an image to run.
    assert!(!root.output(&["images"]).stdout.contains("disk.img"));

    root.output(&["image", "pin", &url]);
    root.output(&["prune", "-a", "-f"]);
    assert!(root.output(&["images", "--disks"]).stdout.contains(&url));
    root.output(&["rmi", &url])
        .printed(&format!("Untagged: {url}\nDeleted: {id}\n"));
    assert_eq!(root.files_ending_in(".raw").len(), 0);
    root.output(&["rmi", &url])
        .refused(1, &["no image", "disk.img"]);
}

#[test]
fn what_is_no_disk_image_is_refused_with_the_remedy() {
    let root = Root::default();
    let url = serve(b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\x01\0\0\0\0\x08");
    let wrong = sha256(b"another");
    root.output(&["pull", &url])
        .refused(1, &["is not a usable disk image", "needs a backing file"]);
    root.output(&["pull", &url, "--checksum", &wrong])
        .refused(1, &["instead of", &wrong]);
    root.output(&["pull", &format!("{url}x")])
        .refused(1, &["there is no http://"]);
    root.output(&["pull", "http://192.0.2.1/x"])
        .refused(1, &["is plain HTTP", "--checksum sha256:"]);
    root.output(&["pull", "busybox", "--checksum", &wrong])
        .refused(1, &["NAME@sha256:"]);
    let ran = root.output(&["pull", &url, "--checksum", "md5:00"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert_eq!(root.files_ending_in(".raw").len(), 0);
}
