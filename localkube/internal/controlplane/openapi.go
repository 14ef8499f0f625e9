package controlplane

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/emicklei/go-restful/v3"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/handler3"
)

// openAPIRoot is the path of the list of OpenAPI v3 documents.
const openAPIRoot = "/openapi/v3"

// openAPI serves the OpenAPI v3 documents of the built-in kinds, one for each group and version. Upstream builds and
// encodes all of them at the start, which takes a sixth of its processor time; most control planes are asked for a few
// of them or for none.
type openAPI struct {
	config    *common.OpenAPIV3Config
	container *restful.Container

	// mu guards documents, which has a handler for each document that has been asked for. It is held while one is
	// built.
	mu        sync.Mutex
	documents map[string]http.Handler
}

// installOpenAPI makes server, which was built without OpenAPI documents, serve them.
func installOpenAPI(server *genericapiserver.GenericAPIServer, config *common.OpenAPIV3Config) {
	o := &openAPI{config: config, container: server.Handler.GoRestfulContainer, documents: map[string]http.Handler{}}
	server.Handler.NonGoRestfulMux.HandleFunc(openAPIRoot, o.serveList)
	server.Handler.NonGoRestfulMux.HandlePrefix(openAPIRoot+"/", http.HandlerFunc(o.serveDocument))
}

// serveList serves the list of documents. Their addresses have no hashes of what they contain, which would have to be
// built first.
func (o *openAPI) serveList(w http.ResponseWriter, _ *http.Request) {
	list := handler3.OpenAPIV3Discovery{Paths: map[string]handler3.OpenAPIV3DiscoveryGroupVersion{}}
	for _, service := range o.container.RegisteredWebServices() {
		name := strings.TrimPrefix(service.RootPath(), "/")
		list.Paths[name] = handler3.OpenAPIV3DiscoveryGroupVersion{ServerRelativeURL: openAPIRoot + "/" + name}
	}
	text, err := json.Marshal(list)
	if err != nil {
		http.Error(w, fmt.Sprintf("encode list of OpenAPI documents: %v", err), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text) // an error means that the client is gone
}

// serveDocument serves the document of one group and version.
func (o *openAPI) serveDocument(w http.ResponseWriter, r *http.Request) {
	document := o.document(strings.TrimPrefix(r.URL.Path, openAPIRoot+"/"))
	if document == nil {
		http.NotFound(w, r)
		return
	}
	document.ServeHTTP(w, r)
}

// document returns the handler of a document, nil if there is none. It builds the document if nobody has asked for it
// before.
func (o *openAPI) document(name string) http.Handler {
	o.mu.Lock()
	defer o.mu.Unlock()
	if known := o.documents[name]; known != nil {
		return known
	}
	for _, service := range o.container.RegisteredWebServices() {
		if strings.TrimPrefix(service.RootPath(), "/") != name {
			continue
		}
		one := restful.NewContainer()
		one.Add(service)
		handler := mux.NewPathRecorderMux("openapi")
		routes.OpenAPI{V3Config: o.config}.InstallV3(one, handler)
		o.documents[name] = handler
		return handler
	}
	return nil
}
