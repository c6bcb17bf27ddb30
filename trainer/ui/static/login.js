// A link with #token=... logs in by itself; the token leaves the address bar and the history first.
"use strict";
function enter() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  history.replaceState(null, "", location.pathname);
  const form = document.getElementById("login");
  form.elements.token.value = given;
  form.submit();
}
addEventListener("hashchange", enter); // the link was pasted into this page's address
enter();
