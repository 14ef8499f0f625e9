package kube

import "io"

// LimitBody returns a body of a response that returns exceeded when more than limit bytes are read.
func LimitBody(body io.ReadCloser, limit int64, exceeded error) io.ReadCloser {
	return &limitedBody{body: body, left: limit, exceeded: exceeded}
}

type limitedBody struct {
	body     io.ReadCloser
	left     int64
	exceeded error
}

// Read implements io.Reader.
func (b *limitedBody) Read(p []byte) (int, error) {
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.body.Read(p)
	if int64(n) > b.left {
		return int(b.left), b.exceeded
	}
	b.left -= int64(n)
	return n, err
}

// Close closes the body.
func (b *limitedBody) Close() error { return b.body.Close() }
