/* A page that is read from a disk may start no worker, and the search runs in one: there it runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inner.document.createElement("script")
      this.inner = new Promise((resolve) => script.addEventListener("load", () => resolve(inner)))
      script.src = url
      inner.document.body.append(script)
    }

    postMessage(data) {
      this.inner.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
