package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protowire"
)

const (
	// registryPrefix is the prefix of the keys of all objects of the API server.
	registryPrefix = "/registry/"
	// pageSize is the number of objects that are read from etcd at once.
	pageSize = 500
)

// etcd reads and writes the storage of the API server. It is a gRPC client with the two methods that are needed.
type etcd struct{ http http.Client }

// stored is an object in etcd: custom resources in JSON, others in protobuf.
type stored struct {
	key   string
	value []byte
}

// newEtcd returns a client of the etcd of the control plane with that directory.
func newEtcd(planeDir string) *etcd {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(planeDir, "etcd.sock"))
	}, Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	return &etcd{http: http.Client{Transport: transport}}
}

// forEach calls do for each object whose key has that prefix.
func (e *etcd) forEach(ctx context.Context, prefix string, do func(stored) error) error {
	key, end := prefix, prefix[:len(prefix)-1]+string(prefix[len(prefix)-1]+1)
	for {
		request := appendBytes(appendBytes(nil, 1, []byte(key)), 2, []byte(end))
		request = protowire.AppendVarint(protowire.AppendTag(request, 3, protowire.VarintType), pageSize)
		response, err := e.call(ctx, "Range", request)
		if err != nil {
			return fmt.Errorf("read %s from etcd: %w", prefix, err)
		}
		var page []stored
		more := false
		for number, field := range fieldsOf(response) {
			switch number {
			case 2:
				page = append(page, storedOf(field))
			case 3:
				more = true
			}
		}
		for _, object := range page {
			if err := do(object); err != nil {
				return err
			}
		}
		if !more || len(page) == 0 {
			return nil
		}
		key = page[len(page)-1].key + "\x00"
	}
}

// put writes an object.
func (e *etcd) put(ctx context.Context, object stored) error {
	if _, err := e.call(ctx, "Put", appendBytes(appendBytes(nil, 1, []byte(object.key)), 2, object.value)); err != nil {
		return fmt.Errorf("write %s to etcd: %w", object.key, err)
	}
	return nil
}

// call calls a method of the service KV with an encoded message, and returns the encoded response.
func (e *etcd) call(ctx context.Context, method string, message []byte) ([]byte, error) {
	// The message follows a flag, which means that it is not compressed, and its length.
	body := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...) //nolint:gosec // etcd limits a message to 1.5 MB
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://etcd/etcdserverpb.KV/"+method, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/grpc")
	request.Header.Set("Te", "trailers")
	response, err := e.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	for _, header := range []http.Header{response.Header, response.Trailer} {
		if status := header.Get("Grpc-Status"); status != "" && status != "0" {
			return nil, fmt.Errorf("status %s: %s", status, header.Get("Grpc-Message"))
		}
	}
	if len(raw) < 5 || response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s with %d bytes", response.Status, len(raw))
	}
	return raw[5:], nil
}

func appendBytes(message []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(message, number, protowire.BytesType), value)
}

// fieldsOf returns the fields of an encoded message: their numbers, and the values of those with bytes.
func fieldsOf(message []byte) func(yield func(protowire.Number, []byte) bool) {
	return func(yield func(protowire.Number, []byte) bool) {
		for len(message) > 0 {
			number, kind, n := protowire.ConsumeTag(message)
			size := protowire.ConsumeFieldValue(number, kind, message[max(n, 0):])
			if n < 0 || size < 0 {
				return
			}
			field := message[n : n+size]
			if message = message[n+size:]; kind == protowire.BytesType {
				field, _ = protowire.ConsumeBytes(field)
			}
			if !yield(number, field) {
				return
			}
		}
	}
}

// storedOf decodes a message KeyValue.
func storedOf(message []byte) stored {
	var object stored
	for number, field := range fieldsOf(message) {
		switch number {
		case 1:
			object.key = string(field)
		case 5:
			object.value = field
		}
	}
	return object
}
