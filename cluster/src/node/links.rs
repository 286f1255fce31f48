//! Links of cards that come and go while a VM runs: a PUT of `/v1/NAMESPACE/NAME/UID/links`, for
//! the controller.

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use podvisor_node_api::messages::VmName;
use serde_json::json;

use super::{
    answers::{failure, limited},
    machines::Machines,
};
use crate::{
    contact::links::LinksRequest,
    https::{self, Answer},
    status::Failure,
};

/// Reads a path; `None` if it is none of a VM's links.
pub(super) fn asked(method: &Method, path: &str) -> Option<VmName> {
    let steps: Vec<&str> = path.strip_prefix("/v1/")?.split('/').collect();
    let [namespace, name, uid, "links"] = *steps.as_slice() else {
        return None;
    };
    let is_named = [namespace, name, uid].iter().all(|step| !step.is_empty());
    (is_named && method == Method::PUT).then(|| VmName::new(namespace, name, uid))
}

/// Answers the controller.
pub(super) async fn answer(
    request: Request<Incoming>,
    vm: VmName,
    machines: &Machines,
) -> Result<Answer, Failure> {
    let body = match https::read_body(request.into_body()).await {
        Ok(body) => body,
        Err(answer) => return Ok(answer),
    };
    let with: Result<LinksRequest, _> = serde_json::from_slice(&body);
    let with =
        with.map_err(|error| Failure::bad_request(format!("the request is invalid: {error}")))?;
    let done = limited(machines.set_links(&vm, with.down)).await;
    done.map_err(|refusal| failure(&refusal))?;
    Ok(https::json(StatusCode::OK, &json!({})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_vm_and_its_links() {
        let put = |path| asked(&Method::PUT, path);
        assert_eq!(put("/v1/a/b/c/links"), Some(VmName::new("a", "b", "c")));
        for path in ["/v1/a/b/c", "/v1/a//c/links", "/v1/a/b/c/links/more"] {
            assert_eq!(put(path), None, "{path}");
        }
        assert_eq!(asked(&Method::GET, "/v1/a/b/c/links"), None);
    }
}
